"""``index.json``: every tensor's global shape and dtype, and the file and key of each of its boxes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from megalith.checkpoint.box import Box
from megalith.checkpoint.shard_header import DTYPES
from megalith.errors import CheckpointError
from megalith.storage import shown

__all__ = ["INDEX", "Piece", "StoredTensor", "index_of", "key_of", "parse_index"]

INDEX = "index.json"

T = TypeVar("T")


@dataclass(frozen=True)
class Piece:
    """One box of a tensor, stored in ``file`` of the checkpoint's folder under ``key``.

    Megalith's checkpoints store each box as it is. Files in other formats may store its dimensions permuted (``dims``,
    as for ``Tensor.permute``), or several tensors packed into one: ``box`` is then everything stored, and extends
    beyond the bounds of the tensor.
    """

    file: str
    key: str
    box: Box
    dims: tuple[int, ...] | None = None


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of global ``shape`` and ``dtype`` (torch's name, e.g. "float32"), divided into ``pieces``."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]


def key_of(name: str, shape: Sequence[int], box: Box) -> str:
    """Returns the key of a box in its file: the tensor's name, followed by the ranges unless it is the whole tensor."""
    if box == Box.whole(shape):
        return name
    return f"{name}@{','.join(f'{start}:{stop}' for start, stop in box.ranges)}"


def index_of(tensors: Mapping[str, StoredTensor]) -> bytes:
    """Returns the index file of ``tensors``, one line each."""
    lines = []
    for name in sorted(tensors):
        tensor = tensors[name]
        boxes = [{"file": piece.file, "key": piece.key, "ranges": piece.box.ranges} for piece in tensor.pieces]
        lines.append(
            f"{json.dumps(name)}: {json.dumps({'shape': tensor.shape, 'dtype': tensor.dtype, 'boxes': boxes})}"
        )
    return ('{"tensors": {\n' + ",\n".join(lines) + "\n}}\n").encode()


def parse_index(content: bytes) -> dict[str, StoredTensor]:
    """Returns the tensors of an index by name, each checked on its own. Raises CheckpointError."""
    try:
        return {name: _stored_tensor(entry) for name, entry in json.loads(content)["tensors"].items()}
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(f"{INDEX} is not a valid tensor index: {error!r}") from error


def _stored_tensor(entry: Any) -> StoredTensor:
    shape = tuple(_exactly(int, size) for size in entry["shape"])
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {entry['dtype']}")
    pieces = []
    for piece in entry["boxes"]:
        box = Box(tuple((_exactly(int, start), _exactly(int, stop)) for start, stop in piece["ranges"]))
        if len(box.ranges) != len(shape) or box.num_elements == 0 or box.overlap(Box.whole(shape)) != box:
            raise ValueError(f"box {piece['ranges']} must be non-empty and lie within shape {shape}")
        file = _exactly(str, piece["file"])
        if Path(file).name != file or Path(file).suffix != ".safetensors":
            raise ValueError(f"file {file!r} must be a .safetensors file directly in the folder")
        pieces.append(Piece(file, _exactly(str, piece["key"]), box))
    return StoredTensor(shape, entry["dtype"], tuple(pieces))


def _exactly(kind: type[T], value: Any) -> T:
    """Returns ``value`` if its type is exactly ``kind``: JSON's ``true`` is an int, and int() accepts "2" and 2.5."""
    if type(value) is not kind:
        raise TypeError(f"{shown(value)} should be of type {kind.__name__}")
    return value
