"""Finds the special tokens that a task needs, by the names that published tokenizers use."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from megalith.config.model_kind import ModelKind
from megalith.data.tokenizer import EOD, Tokenizer
from megalith.errors import DataError

__all__ = [
    "SPECIAL_TOKENS",
    "BertTokens",
    "T5Tokens",
    "bert_tokens",
    "fill_in_the_middle_tokens",
    "spelled",
    "t5_tokens",
    "text_frame",
]

_NUM_SENTINELS = 100

# special tokens of a trained tokenizer, for each kind of model and for fill-in-the-middle
SPECIAL_TOKENS = MappingProxyType(
    {
        "bert": ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
        "t5": ("<pad>", *(f"<extra_id_{number}>" for number in range(_NUM_SENTINELS))),
        "fim": ("<fim_prefix>", "<fim_middle>", "<fim_suffix>"),
    }
)

# tokens of these before and after a text, where a model needs some
_FRAMES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = MappingProxyType(
    {"bert": (("[CLS]",), ("[SEP]",)), "t5": ((), (EOD,))}
)

# BERT's and RoBERTa's names
_BERT_NAMES = {
    "classifier": ("[CLS]", "<s>"),
    "separator": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
    "padding": ("[PAD]", "<pad>"),
}

# tokens before prefix, middle and suffix: StarCoder; SantaCoder; Qwen and CodeGemma; DeepSeek
_FIM_NAMES = (
    SPECIAL_TOKENS["fim"],
    ("<fim-prefix>", "<fim-middle>", "<fim-suffix>"),
    ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    ("<｜fim▁begin｜>", "<｜fim▁end｜>", "<｜fim▁hole｜>"),  # noqa: RUF001
)


@dataclass(frozen=True)
class BertTokens:
    """Ids of BERT's special tokens."""

    classifier: int
    separator: int
    mask: int
    padding: int


@dataclass(frozen=True)
class T5Tokens:
    """Ids of T5's special tokens; ``sentinels`` int64 [N], in the order in which spans use them."""

    padding: int
    end: int
    sentinels: NDArray[np.int64]


def bert_tokens(tokenizer: Tokenizer) -> BertTokens:
    """Returns BERT's special tokens. Raises DataError that lists missing ones."""
    found: dict[str, int] = {}
    missing: list[str] = []
    for role, names in _BERT_NAMES.items():
        ids = [id for name in names if (id := tokenizer.token_id(name)) is not None]
        if ids:
            found[role] = ids[0]
        else:
            missing.append(f"{role} token ({' or '.join(names)})")
    if missing:
        raise _missing(tokenizer, "BERT", f"a {', a '.join(missing)}", "bert")
    return BertTokens(**found)


def t5_tokens(tokenizer: Tokenizer) -> T5Tokens:
    """Returns T5's special tokens: padding, sentinels, and the end token, which is the tokenizer's eod.

    Raises DataError that lists what is missing: the padding token, sentinels, or both.
    """
    padding = tokenizer.token_id("<pad>")
    sentinels: list[int] = []
    while (id := tokenizer.token_id(f"<extra_id_{len(sentinels)}>")) is not None:
        sentinels.append(id)
    missing: list[str] = []
    if padding is None:
        missing.append("a padding token (<pad>)")
    if not sentinels:
        missing.append("sentinels (<extra_id_0>, <extra_id_1>, ...)")
    if padding is None or missing:
        raise _missing(tokenizer, "T5", " and ".join(missing), "t5")
    return T5Tokens(padding, tokenizer.eod, np.array(sentinels, np.int64))


def fill_in_the_middle_tokens(
    tokenizer: Tokenizer, given: tuple[str | None, str | None, str | None]
) -> tuple[int, int, int]:
    """Returns the ids of the tokens before prefix, middle and suffix: those ``given``, or by their published names.

    Raises DataError that lists missing ones.
    """
    for published in _FIM_NAMES:
        names = [own or name for own, name in zip(given, published, strict=True)]
        prefix, middle, suffix = (tokenizer.token_id(name) for name in names)
        if prefix is not None and middle is not None and suffix is not None:
            return prefix, middle, suffix
    names = [own or name for own, name in zip(given, _FIM_NAMES[0], strict=True)]
    missing = [name for name in names if tokenizer.token_id(name) is None]
    raise _missing(tokenizer, "data.fill_in_the_middle", f"the tokens {', '.join(missing)}", "fim")


def text_frame(kinds: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The tokens before and after a text in a tokenizer trained for ``kinds``; none if these need different ones."""
    frames = {_FRAMES[kind] for kind in kinds if kind in _FRAMES}
    return frames.pop() if len(frames) == 1 else ((), ())


def spelled(tokenizer: Tokenizer, kind: ModelKind) -> dict[str, str]:
    """The special tokens of ``tokenizer`` that a model of ``kind`` uses, by their names in transformers."""
    bert = dict(zip(("cls_token", "sep_token", "mask_token", "pad_token"), _BERT_NAMES.values(), strict=True))
    roles: Mapping[ModelKind, Mapping[str, tuple[str, ...]]] = {
        "gpt": {},
        "bert": bert,
        "t5": {"pad_token": ("<pad>",)},
    }
    found = {
        role: next((name for name in names if tokenizer.token_id(name) is not None), None)
        for role, names in roles[kind].items()
    }
    return {role: name for role, name in found.items() if name is not None}


def _missing(tokenizer: Tokenizer, purpose: str, what: str, kind: str) -> DataError:
    return DataError(
        f"{purpose} needs a tokenizer with {what}; {tokenizer.name} has none; prepare the data with a tokenizer.json "
        f"that has them, or train one with: megalith data prepare FILES... --out PREFIX --vocab-size N "
        f"--special-tokens {kind}"
    )
