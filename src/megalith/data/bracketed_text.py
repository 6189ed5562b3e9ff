"""Text with some of its tokens in brackets."""

from collections.abc import Sequence
from itertools import groupby

from megalith.data.tokenizer import Tokenizer

__all__ = ["bracketed_text"]


def bracketed_text(ids: Sequence[int], in_brackets: Sequence[bool], tokenizer: Tokenizer | None) -> str:
    """Decodes ``ids``, with those that ``in_brackets`` marks in brackets; shows ids if there is no tokenizer."""
    marked = list(zip(in_brackets, ids, strict=True))
    if tokenizer is None:
        return " ".join(f"[{id}]" if is_marked else str(id) for is_marked, id in marked)
    pieces: list[str] = []
    for is_marked, run in groupby(marked, key=lambda pair: pair[0]):  # decoded together, to keep characters whole
        text = tokenizer.decode([id for _, id in run])
        pieces.append(f"[{text}]" if is_marked else text)
    return "".join(pieces)
