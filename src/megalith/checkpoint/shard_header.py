"""The header of a ``.safetensors`` file: dtype, shape and byte range of each tensor.

Format (huggingface.co/docs/safetensors, "Format"): 8 bytes N, unsigned little-endian; N bytes of JSON that begin with
"{" and may be padded with spaces, {key: {"dtype", "shape", "data_offsets": [begin, end) after the header}}; then the
elements, row-major, little-endian, without gaps.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from megalith.errors import CheckpointError
from megalith.storage import Store

__all__ = ["DTYPES", "ShardEntry", "header_of", "read_header"]

# torch's name of each dtype that a checkpoint may hold -> the format's name
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_ITEMSIZES = {name: getattr(torch, dtype).itemsize for dtype, name in DTYPES.items()}
_METADATA = "__metadata__"
# bytes of header, enough for 250,000 tensors. The format allows 100 MB, whose entries would exceed the memory budget
# of a conversion
_LONGEST = 1 << 25
_LONGEST_ENTRY = 1 << 10  # bytes of the entry of one tensor
_SPACES = re.compile(rb"[ \t\n\r]*")


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """A tensor in a file: ``dtype`` is the format's name, ``begin`` and ``end`` are byte offsets in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def header_of(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Returns the length field and the JSON for ``tensors`` in this order, padded to a multiple of 8 bytes."""
    # transformers rejects files without the framework's name
    entries: dict[str, Any] = {_METADATA: {"format": "pt"}}
    begin = 0
    for key, tensor in tensors.items():
        end = begin + tensor.numel() * tensor.element_size()
        dtype = DTYPES[str(tensor.dtype).removeprefix("torch.")]
        entries[key] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(store: Store, name: str) -> dict[str, ShardEntry]:
    """Returns the tensors of the file ``name``, by key: each byte after the header belongs to exactly one of them.

    Raises:
        CheckpointError: it is not a safetensors file, or holds something that checkpoints do not.
        StorageError: it cannot be read.
    """
    num_bytes = store.size(name)
    if num_bytes < 8:
        raise CheckpointError(f"a safetensors file begins with an 8-byte header length; the file has {num_bytes} bytes")
    length = int.from_bytes(store.read(name, 0, 8), "little")
    if length > min(num_bytes - 8, _LONGEST):
        raise CheckpointError(
            f"its header must fit in the file ({num_bytes:,} bytes) and have at most {_LONGEST:,} bytes, enough for "
            f"250,000 tensors; got {length:,}; save a model with more tensors in several files"
        )
    try:
        return _parse(store.read(name, 8, 8 + length), 8 + length, num_bytes)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"invalid safetensors header: {error}") from error


def _parse(text: bytes, first: int, last: int) -> dict[str, ShardEntry]:
    """Returns the entries of a header whose elements span bytes ``first`` to ``last``. Raises ValueError or similar."""
    if not text.startswith(b"{"):
        raise ValueError(f"it must begin with '{{'; got {text[:1]!r}")
    header, entries = _Header(text), dict[str, ShardEntry]()
    for key in header.members():
        if key in entries:
            raise ValueError("duplicate key")
        if key == _METADATA:
            for _ in header.members():
                header.skip_text()
        else:
            entries[key] = _entry(key, first, **header.flat_object())
    header.end()
    end = first
    for key in sorted(entries, key=lambda key: (entries[key].begin, entries[key].end)):
        if entries[key].begin != end:
            raise ValueError(
                f"{key} must begin at byte {end}, without gap or overlap; it begins at {entries[key].begin}"
            )
        end = entries[key].end
    if end != last:
        raise ValueError(f"the tensors end at byte {end}, but the file ends at byte {last}")
    return entries


class _Header:
    """An incremental JSON reader: parsing a malicious header as a whole could take 30 times its size in memory.

    Every method raises ValueError on unexpected input.
    """

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._at = 0  # read position

    def members(self) -> Iterator[str]:
        """Yields the keys of the next object; the caller reads each value."""
        self._take(b"{")
        if self._next() == b"}":
            self._take(b"}")
            return
        while True:
            key = self.key()
            self._take(b":")
            yield key
            if self._take(b",", b"}") == b"}":
                return

    def key(self) -> str:
        """Returns the next string."""
        self._next()
        start = self._at
        self.skip_text()
        if self._at - start > _LONGEST_ENTRY:
            raise ValueError(f"the name at byte {start} must have at most {_LONGEST_ENTRY} bytes")
        found: str = json.loads(self._text[start : self._at])
        return found

    def skip_text(self) -> None:
        """Skips the next string, a metadata value or a name."""
        if self._next() != b'"':
            raise ValueError(f"names and the values of {_METADATA} must be strings; byte {self._at} does not begin one")
        start = end = self._at
        while True:
            end = self._text.find(b'"', end + 1)
            if end < 0:
                raise ValueError(f"unterminated string at byte {start}")
            before = end
            while self._text[before - 1] == 0x5C:  # a backslash: an odd number of them escapes the quotation mark
                before -= 1
            if (end - before) % 2 == 0:
                break
        self._at = end + 1

    def flat_object(self) -> dict[str, Any]:
        """Returns the next object, which must not be nested."""
        self._next()
        end = self._text.find(b"}", self._at, self._at + _LONGEST_ENTRY) + 1
        if end == 0:
            raise ValueError(f"the entry at byte {self._at} must be an object of at most {_LONGEST_ENTRY} bytes")
        fields: dict[str, Any] = json.loads(self._text[self._at : end], object_pairs_hook=_without_repetition)
        self._at = end
        return fields

    def end(self) -> None:
        """Checks that only whitespace follows."""
        if self._next():
            raise ValueError(f"unexpected content after the object, at byte {self._at}")

    def _next(self) -> bytes:
        """Skips whitespace and returns the next byte, empty at the end."""
        spaces = _SPACES.match(self._text, self._at)
        assert spaces is not None, "the pattern matches an empty string"
        self._at = spaces.end()
        return self._text[self._at : self._at + 1]

    def _take(self, *wanted: bytes) -> bytes:
        found = self._next()
        if found not in wanted:
            raise ValueError(f"expected {b' or '.join(wanted).decode()} at byte {self._at}; got {found!r}")
        self._at += 1
        return found


def _entry(key: str, first: int, dtype: str, shape: list[int], data_offsets: list[int]) -> ShardEntry:
    if dtype not in _ITEMSIZES:
        raise ValueError(f"{key}: dtype must be one of {', '.join(_ITEMSIZES)}; got {dtype}")
    begin, end = data_offsets
    for number in (*shape, begin, end):
        if type(number) is not int or number < 0:
            raise ValueError(f"{key}: shape and data_offsets must be non-negative integers; got {number!r}")
    if end - begin != prod(shape) * _ITEMSIZES[dtype]:
        raise ValueError(f"{key}: data_offsets span {end - begin} bytes, which does not match {dtype} {shape}")
    return ShardEntry(dtype, tuple(shape), first + begin, first + end)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("duplicate key")
    return content
