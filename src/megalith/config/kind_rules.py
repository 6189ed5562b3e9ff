"""Rules on settings that only some kinds of model support."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from megalith.config.draft import Draft, Violation

__all__ = [
    "bert_positions_are_learned",
    "classes_are_counted",
    "negatives_are_of_queries",
    "only_decoders_write",
    "queries_have_negatives",
]

_BERT, _HEAD, _CLASSES = "model.bert.num_token_types", "model.bert.head", "model.bert.num_classes"
_BATCH, _NEGATIVES = "train.global_batch_size", "data.num_negatives"
_IN_BLOCK = "data.query_in_block_probability"
_OFFSET, _POSITIONS = "model.bert.position_offset", "model.position_embedding_type"

# a group that model.bert does not support -> a setting that the group always has, and the reason
_OF_DECODERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "model.mtp": ("num_modules", "it predicts tokens further ahead, which an encoder already sees"),
        "model.moe": ("num_experts", "padding would also be routed to experts and change the results of other tokens"),
        "train.generation": ("every", "an encoder does not generate text"),
    }
)


def only_decoders_write(run: Draft) -> Iterator[Violation]:
    """model.bert cannot be combined with model.mtp, model.moe or train.generation."""
    if run.get(_BERT) is None:
        return
    for group, (field, why) in _OF_DECODERS.items():
        if run.get(f"{group}.{field}") is not None:
            message = f"{group} cannot be combined with model.bert: {why}"
            yield Violation("only_decoders_write", group, message, ({group: None}, {"model.bert": None}))


def classes_are_counted(run: Draft) -> Iterator[Violation]:
    """bert.head=classification needs bert.num_classes."""
    if run.get(_HEAD) == "classification" and run.get(_CLASSES) is None:
        message = f"{_CLASSES} is missing: {_HEAD}=classification needs the number of classes"
        yield Violation("classes_are_counted", _CLASSES, message, ({_CLASSES: 2},))


def negatives_are_of_queries(run: Draft) -> Iterator[Violation]:
    """data.num_negatives and data.query_in_block_probability need bert.head=embedding."""
    for name in (_NEGATIVES, _IN_BLOCK):
        if run.get(name) and run.get(_HEAD) != "embedding":
            message = f"{name} ({run.get(name)}) needs {_HEAD}=embedding: no other model compares a query with passages"
            yield Violation("negatives_are_of_queries", name, message, ({name: None},))


def queries_have_negatives(run: Draft) -> Iterator[Violation]:
    """bert.head=embedding needs negatives: other samples in the global batch, or data.num_negatives."""
    batch = run.get(_BATCH)
    if run.get(_HEAD) == "embedding" and batch == 1 and not run.get(_NEGATIVES):
        message = (
            f"{_BATCH} ({batch}) must be at least 2 with {_HEAD}=embedding and without {_NEGATIVES}: the passages of "
            "other queries in the batch are the negatives"
        )
        yield Violation("queries_have_negatives", _BATCH, message, ({_BATCH: 2}, {_NEGATIVES: 1}))


def bert_positions_are_learned(run: Draft) -> Iterator[Violation]:
    """bert.position_offset needs position_embedding_type=learned_absolute: it counts rows of that table."""
    offset, positions = run.get(_OFFSET), run[_POSITIONS]
    if offset and positions != "learned_absolute":
        message = f"{_OFFSET} ({offset}) has no effect with {_POSITIONS}={positions}, only with learned_absolute"
        yield Violation("bert_positions_are_learned", _OFFSET, message, ({_OFFSET: None},))
