"""Finds where words begin in a sequence of token ids, for whole-word masking.

WordPiece        a token with the continuation prefix (##) continues the previous word
SentencePiece    a token that begins with U+2581 begins a word; any other continues one
byte-level BPE   a token begins a word if it begins with white space, or at a boundary between letters, digits and other
                 symbols, which is where GPT-2's pre-tokenizer (Radford et al. 2019) splits text
any other        every token is a word
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["WordStarts"]

_META = "\u2581"
_LETTER, _DIGIT, _SIGN, _SPACE = range(1, 5)


@dataclass(frozen=True)
class WordStarts:
    """Lookup tables over the vocabulary, [V] each.

    Attributes:
        always: whether the token begins a word in any context.
        first, last: kind of its first and last character; a word begins where adjacent kinds differ.
    """

    always: NDArray[np.bool_]
    first: NDArray[np.int8]
    last: NDArray[np.int8]

    @classmethod
    def of(cls, tokenizer: Mapping[str, Any], vocabulary: Mapping[str, int], num_ids: int) -> "WordStarts":
        """Builds the tables from the content of a tokenizer.json and its ``vocabulary`` of ids below ``num_ids``."""
        always = np.ones(num_ids, np.bool_)
        first, last = np.zeros(num_ids, np.int8), np.zeros(num_ids, np.int8)
        model = tokenizer["model"]
        parts = _types(tokenizer.get("pre_tokenizer")) | _types(tokenizer.get("decoder"))
        special = {token["id"] for token in tokenizer.get("added_tokens", ())}
        words = ((text, id) for text, id in vocabulary.items() if id not in special and text)
        if model.get("type") == "WordPiece":
            prefix = model.get("continuing_subword_prefix", "##")
            for text, id in words:
                always[id] = not text.startswith(prefix)
        elif "ByteLevel" in parts:
            kinds = _kinds_of_bytes()
            for text, id in words:
                kind = [kinds.get(character, _LETTER) for character in text]
                first[id], last[id] = kind[0], kind[-1]
                always[id] = kind[0] == _SPACE and kind[-1] != _SPACE
        elif "Metaspace" in parts or any(text.startswith(_META) for text in vocabulary):
            for text, id in words:
                always[id] = text.startswith(_META)
        return cls(always, first, last)

    def __call__(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """bool [T]: which of the consecutive ``ids`` [T] begin a word; the first always does."""
        starts = self.always[ids]
        starts[1:] |= self.first[ids[1:]] != self.last[ids[:-1]]
        starts[:1] = True
        return starts


def _types(part: Any) -> set[str]:
    """The types of a pre-tokenizer or decoder and, for a Sequence, of its elements."""
    if not isinstance(part, Mapping):
        return set()
    inner = [*part.get("pretokenizers", ()), *part.get("decoders", ())]
    return {str(part.get("type"))}.union(*map(_types, inner))


def _kinds_of_bytes() -> dict[str, int]:
    """The kind of each byte, by the character that represents it in a byte-level vocabulary.

    Printable bytes represent themselves; the others are mapped in order to the characters from U+0100 on (GPT-2).
    """
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printed]
    names = {byte: chr(byte) for byte in printed} | {byte: chr(256 + place) for place, byte in enumerate(others)}
    return {name: _kind_of_byte(byte) for byte, name in names.items()}


def _kind_of_byte(byte: int) -> int:
    character = chr(byte)
    if byte >= 0x80 or character.isalpha():  # most non-ASCII bytes belong to letters
        return _LETTER
    if character.isdigit():
        return _DIGIT
    return _SPACE if character.isspace() else _SIGN
