"""Formats a sample for the user: its text, with some of its tokens in brackets."""

from collections.abc import Sequence

from megalith.data.bracketed_text import bracketed_text
from megalith.data.tokenizer import Tokenizer

__all__ = ["bracketed"]

_SHOWN_TOKENS = 64


def bracketed(ids: Sequence[int], in_brackets: Sequence[bool], tokenizer: Tokenizer | None) -> list[str]:
    """Decodes the first tokens of ``ids`` to lines; shows token ids if there is no tokenizer."""
    text = bracketed_text(ids[:_SHOWN_TOKENS], in_brackets[:_SHOWN_TOKENS], tokenizer)
    return [f"  {text}"] if tokenizer is None else ["  | " + line for line in text.splitlines()]
