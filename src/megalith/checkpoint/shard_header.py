"""The header of a ``.safetensors`` file: which tensor, of which dtype and shape, lies in which bytes.

Format (huggingface.co/docs/safetensors, "Format"): 8 bytes N, unsigned little-endian; N bytes of JSON, which begins
with "{" and may end in spaces, {key: {"dtype", "shape", "data_offsets": [begin, end) after the header}}; then the
elements, row-major, little-endian, without holes.
"""

import json
from collections.abc import Mapping
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
# bytes of header, which takes up to 26 times as much when it is parsed: a quarter of a million tensors
_LONGEST = 1 << 25


@dataclass(frozen=True)
class ShardEntry:
    """A tensor of a file: ``dtype`` is the format's name, ``begin`` and ``end`` are bytes of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def header_of(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """The length field and the JSON for ``tensors`` in this order, padded to a multiple of 8 bytes."""
    # transformers refuses files that do not say which framework wrote them
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
    """The tensors of the file ``name``, by key: each byte after the header belongs to exactly one of them.

    Raises:
        CheckpointError: it is not a safetensors file, or holds something that a checkpoint does not.
        StorageError: it cannot be read.
    """
    num_bytes = store.size(name)
    if num_bytes < 8:
        raise CheckpointError(f"a safetensors file begins with 8 bytes of length; it has {num_bytes} bytes")
    length = int.from_bytes(store.read(name, 0, 8), "little")
    if length > min(num_bytes - 8, _LONGEST):
        raise CheckpointError(
            f"its header should take {length} bytes; the file has {num_bytes}, and {_LONGEST} are allowed"
        )
    try:
        return _parse(store.read(name, 8, 8 + length), 8 + length, num_bytes)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"its header is not that of a safetensors file: {error}") from error


def _parse(text: bytes, first: int, last: int) -> dict[str, ShardEntry]:
    """The entries of a header whose elements take the bytes ``first`` to ``last``. Raises ValueError and its kin."""
    if not text.startswith(b"{"):
        raise ValueError(f"it begins with {text[:1]!r}, not with '{{'")
    content = json.loads(text, object_pairs_hook=_without_repetition)
    metadata = content.pop(_METADATA, {})
    if not all(type(value) is str for value in metadata.values()):
        raise ValueError(f"{_METADATA} must map names to text")
    entries = {key: _entry(key, first, **fields) for key, fields in content.items()}
    end = first
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != end:
            raise ValueError(f"{key} must begin at byte {end}, where the one before ends; it begins at {entry.begin}")
        end = entry.end
    if end != last:
        raise ValueError(f"its tensors end at byte {end}, and the file at {last}")
    return entries


def _entry(key: str, first: int, dtype: str, shape: list[int], data_offsets: list[int]) -> ShardEntry:
    if dtype not in _ITEMSIZES:
        raise ValueError(f"{key} must be one of {', '.join(_ITEMSIZES)}; it is {dtype}")
    begin, end = data_offsets
    for number in (*shape, begin, end):
        if type(number) is not int or number < 0:
            raise ValueError(f"{key} must have sizes and offsets that are integers from 0 on; got {number!r}")
    if end - begin != prod(shape) * _ITEMSIZES[dtype]:
        raise ValueError(f"{key} is {dtype} {shape} and cannot take the {end - begin} bytes that it has")
    return ShardEntry(dtype, tuple(shape), first + begin, first + end)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a key is there twice")
    return content
