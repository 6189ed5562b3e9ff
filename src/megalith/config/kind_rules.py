"""Rules on what goes with which kind of model: settings that only some kinds have a use for."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from megalith.config.draft import Draft, Violation

__all__ = ["bert_positions_are_learned", "classes_are_counted", "only_decoders_write"]

_BERT, _HEAD, _CLASSES = "model.bert.num_token_types", "model.bert.head", "model.bert.num_classes"
_OFFSET, _POSITIONS = "model.bert.position_offset", "model.position_embedding_type"

# a group that model.bert has no use for, by a setting that it always has
_OF_DECODERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "model.mtp": ("num_modules", "it predicts tokens further ahead, and an encoder sees them"),
        "model.moe": ("num_experts", "padding would be sent to experts, too, and change what becomes of tokens"),
        "train.generation": ("every", "an encoder writes no text"),
    }
)


def only_decoders_write(run: Draft) -> Iterator[Violation]:
    """model.bert has neither model.mtp nor model.moe, and its run no train.generation."""
    if run.get(_BERT) is None:
        return
    for group, (field, why) in _OF_DECODERS.items():
        if run.get(f"{group}.{field}") is not None:
            message = f"{group} has no place beside model.bert: {why}"
            yield Violation("only_decoders_write", group, message, ({group: None}, {"model.bert": None}))


def classes_are_counted(run: Draft) -> Iterator[Violation]:
    """bert.head=classification needs bert.num_classes."""
    if run.get(_HEAD) == "classification" and run.get(_CLASSES) is None:
        message = f"{_CLASSES} is missing: {_HEAD}=classification needs the number of classes"
        yield Violation("classes_are_counted", _CLASSES, message, ({_CLASSES: 2},))


def bert_positions_are_learned(run: Draft) -> Iterator[Violation]:
    """bert.position_offset needs position_embedding_type=learned_absolute: it counts rows of that table."""
    offset, positions = run.get(_OFFSET), run[_POSITIONS]
    if offset and positions != "learned_absolute":
        message = f"{_OFFSET} ({offset}) has no effect with {_POSITIONS}={positions}, only with learned_absolute"
        yield Violation("bert_positions_are_learned", _OFFSET, message, ({_OFFSET: None},))
