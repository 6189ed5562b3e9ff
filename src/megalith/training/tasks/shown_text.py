"""Formats a sample for the user: its text, with some of its tokens in brackets."""

from collections.abc import Sequence
from itertools import groupby

from megalith.data.tokenizer import Tokenizer

__all__ = ["bracketed"]

_SHOWN_TOKENS = 64


def bracketed(ids: Sequence[int], in_brackets: Sequence[bool], tokenizer: Tokenizer | None) -> list[str]:
    """Decodes the first tokens of ``ids`` to lines; shows token ids if there is no tokenizer."""
    marked = list(zip(in_brackets[:_SHOWN_TOKENS], ids, strict=False))
    if tokenizer is None:
        return ["  " + " ".join(f"[{id}]" if is_marked else str(id) for is_marked, id in marked)]
    pieces: list[str] = []
    for is_marked, run in groupby(marked, key=lambda pair: pair[0]):  # decoded together, to keep characters whole
        text = tokenizer.decode([id for _, id in run])
        pieces.append(f"[{text}]" if is_marked else text)
    return ["  | " + line for line in "".join(pieces).splitlines()]
