"""A checkpoint of ``torch.distributed.checkpoint``: which part of each tensor is in which bytes of which file.

``.metadata`` is a pickle, read as data (``inert_pickle``): shapes, dtypes, and for each part of a tensor a file and a
range of bytes. That range holds the output of ``torch.save``: an uncompressed zip of the elements and of a small pickle
that describes their layout.
"""

import io
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

from megalith.checkpoint.shard_header import DTYPES, ShardEntry
from megalith.errors import CheckpointError, StorageError
from megalith.models.megatron.inert_pickle import Inert, origin_of, read_pickle, shown
from megalith.storage import Store

__all__ = ["METADATA", "Chunk", "ChunkedTensor", "read_saved", "read_tensors", "rows_of"]

METADATA = ".metadata"

_MOST_METADATA = 1 << 26  # bytes: some 300,000 parts of tensors; reading takes up to 15 times as much memory
_MOST_COMMON = 1 << 24  # bytes of arguments and the like
_MOST_PICKLE = 1 << 20  # bytes that describe the layout of one tensor
_LOCAL_HEADER = 30  # bytes of a zip's header before an entry's name
_MOST_DIMENSIONS = 8

_Part = tuple[str, tuple[int, ...] | None]  # a tensor's key, and the offsets of one of its chunks
_Bytes = tuple[str, int, int]  # a file, the first byte, the byte after the last

# torch's storage classes -> dtype
_STORAGES = {
    "torch.DoubleStorage": "float64",
    "torch.FloatStorage": "float32",
    "torch.BFloat16Storage": "bfloat16",
    "torch.HalfStorage": "float16",
}


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor: the box that begins at ``offsets``, stored in bytes [start, stop) of ``file``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    stop: int


@dataclass(frozen=True)
class ChunkedTensor:
    """A tensor with a floating-point ``dtype`` (torch's name) and a global ``shape``."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def read_tensors(store: Store) -> dict[str, ChunkedTensor]:
    """Returns the floating-point tensors of the checkpoint ``store`` by key.

    Raises:
        CheckpointError: the metadata cannot be read, or names files outside the folder.
        StorageError: there is no metadata.
    """
    size = store.size(METADATA)
    if size > _MOST_METADATA:
        raise CheckpointError(f"{store / METADATA} has {size:,} bytes; the limit is {_MOST_METADATA:,}")
    metadata = read_pickle(store.read(METADATA), str(store / METADATA))
    try:
        fields = metadata.fields()
        places = dict(_places(fields["storage_data"]))
        found = {}
        for key, value in fields["state_dict_metadata"].items():
            if origin_of(value).endswith(".TensorStorageMetadata"):
                tensor = _tensor(str(key), value.fields(), places)
                if tensor is not None:
                    found[str(key)] = tensor
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        told = str(error) if isinstance(error, ValueError) else type(error).__name__
        raise CheckpointError(
            f"{store / METADATA} is not the metadata of a torch.distributed.checkpoint: {told:.200}"
        ) from error
    return found


def rows_of(store: Store, tensor: ChunkedTensor, chunk: Chunk) -> ShardEntry:
    """Locates the elements of ``chunk`` in its file. Raises CheckpointError if they are not stored row-major."""
    name = f"{store / chunk.file}, bytes {chunk.start} to {chunk.stop}"
    with _readable(name):
        with zipfile.ZipFile(_Window(store, chunk.file, chunk.start, chunk.stop)) as archive:
            entries = _entries(archive, {"data.pkl": _MOST_PICKLE, "byteorder": 16})
            data_key, dtype, shape = _description(read_pickle(archive.read(entries["data.pkl"]), name))
            if "byteorder" in entries and archive.read(entries["byteorder"]) != b"little":
                raise ValueError("its byte order is big-endian")
        elements = entries[f"data/{data_key}"]
        num_bytes = prod(chunk.sizes) * _itemsize(tensor.dtype)
        if (dtype, shape) != (tensor.dtype, chunk.sizes) or elements.file_size != num_bytes:
            raise ValueError(f"it holds {dtype} {list(shape)}, but {METADATA} says {tensor.dtype} {list(chunk.sizes)}")
        begin = chunk.start + elements.header_offset
        header = store.read(chunk.file, begin, begin + _LOCAL_HEADER)
        begin += _LOCAL_HEADER + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        if begin + num_bytes > chunk.stop:
            raise ValueError("its elements extend past its end")
    return ShardEntry(DTYPES[tensor.dtype], chunk.sizes, begin, begin + num_bytes)


def read_saved(store: Store, name: str) -> Any:
    """Reads what ``torch.save`` wrote to the file ``name``, as data; tensors come without their elements.

    Raises CheckpointError, or StorageError if there is no such file.
    """
    size = store.size(name)
    with _readable(str(store / name)), zipfile.ZipFile(_Window(store, name, 0, size)) as archive:
        content = archive.read(_entries(archive, {"data.pkl": _MOST_COMMON})["data.pkl"])
    return read_pickle(content, str(store / name))


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """Raises CheckpointError in place of any other error from reading the untrusted file ``name``."""
    try:
        yield
    except (CheckpointError, StorageError):
        raise
    except Exception as error:
        told = str(error) if isinstance(error, ValueError) else type(error).__name__
        raise CheckpointError(f"{name} is not valid torch.save output: {told:.200}") from error


def _entries(archive: zipfile.ZipFile, most: Mapping[str, int]) -> dict[str, zipfile.ZipInfo]:
    """Returns the entries of a torch.save file, by name without the folder. Raises ValueError for unexpected ones."""
    entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.values()):
        raise ValueError("it is compressed")
    if large := [name for name, size in most.items() if name in entries and entries[name].file_size > size]:
        raise ValueError(f"its {large[0]} has {entries[large[0]].file_size:,} bytes; the limit is {most[large[0]]:,}")
    return entries


class _Window(io.RawIOBase):
    """Bytes [start, stop) of a stored file, as a seekable file of their own."""

    def __init__(self, store: Store, name: str, start: int, stop: int) -> None:
        super().__init__()
        if not 0 <= start <= stop <= store.size(name):
            raise ValueError(f"{name} does not contain bytes {start} to {stop}")
        self._store, self._name, self._start, self._stop = store, name, start, stop
        self._position = start

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: self._start, io.SEEK_CUR: self._position, io.SEEK_END: self._stop}[whence]
        if base + offset < self._start:
            raise ValueError("cannot seek to before the first byte")
        self._position = base + offset
        return self.tell()

    def tell(self) -> int:
        return self._position - self._start

    def read(self, size: int = -1) -> bytes:
        stop = self._stop if size < 0 else min(self._position + size, self._stop)
        if stop <= self._position:
            return b""
        content = self._store.read(self._name, self._position, stop)
        self._position = stop
        return content


def _places(storage_data: Mapping[Any, Any]) -> Iterator[tuple[_Part, _Bytes]]:
    """Yields (key, offsets of a chunk) and (file, first byte, the byte after the last)."""
    for index, info in storage_data.items():
        at, place = index.fields(), info.fields()
        file, start, length = place["relative_path"], place["offset"], place["length"]
        if type(file) is not str or "/" in file or "\\" in file or file in ("", ".", ".."):
            raise ValueError(f"it names the file {shown(file)}, which is not in its own folder")
        if place.get("transform_descriptors"):
            raise ValueError(f"{file} is compressed or encrypted")
        if type(start) is not int or type(length) is not int or start < 0 or length < 0:
            raise ValueError(f"offset {shown(start)} and length {shown(length)} in {file} are not a valid range")
        offset = at.get("offset")
        yield (str(at["fqn"]), None if offset is None else _sizes(offset)), (file, start, start + length)


def _tensor(key: str, fields: Mapping[str, Any], places: Mapping[_Part, _Bytes]) -> ChunkedTensor | None:
    """Returns the tensor that the metadata describe; None if it is not floating-point."""
    dtype = _dtype(fields["properties"])
    if dtype is None:
        return None
    chunks = []
    for described in fields["chunks"]:
        chunk = described.fields()
        offsets, sizes = _sizes(chunk["offsets"]), _sizes(chunk["sizes"])
        file, start, stop = places.get((key, offsets)) or places[key, None]
        chunks.append(Chunk(offsets, sizes, file, start, stop))
    shape = _sizes(fields["size"])
    if any(len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape) for chunk in chunks):
        raise ValueError(f"{key} has chunks with a different number of dimensions")
    return ChunkedTensor(dtype, shape, tuple(chunks))


def _dtype(properties: Inert) -> str | None:
    """Returns torch's name of the dtype in ``TensorProperties``, whose state begins with it; None if not floating."""
    state = properties.state
    value = state["dtype"] if isinstance(state, dict) else state[0]
    name = origin_of(value).removeprefix("torch.")
    return name if name in _STORAGES.values() else None


def _sizes(size: Any) -> tuple[int, ...]:
    """Returns the sizes of a ``torch.Size``, which is pickled as a call with a tuple."""
    found = size.args[0] if isinstance(size, Inert) else size
    if not isinstance(found, tuple | list) or len(found) > _MOST_DIMENSIONS:
        raise TypeError(f"a shape must be a tuple; got {shown(found)}")
    if any(type(number) is not int or not 0 <= number < 2**40 for number in found):
        raise ValueError(f"a shape must consist of non-negative integers below 2^40; got {shown(found)}")
    return tuple(found)


def _description(saved: Any) -> tuple[str, str, tuple[int, ...]]:
    """Returns (key of the elements, dtype, shape) of a tensor stored row-major from the first element on."""
    if origin_of(saved) != "torch._utils._rebuild_tensor_v2":
        raise ValueError(f"it is {origin_of(saved):.80}, not a plain tensor")
    storage, first, shape, strides = saved.args[:4]
    _, kind, data_key, _, _ = storage.args
    dtype, shape = _STORAGES[origin_of(kind)], _sizes(shape)
    row_major = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    if first != 0 or any(
        wanted != given for wanted, given, size in zip(row_major, strides, shape, strict=True) if size > 1
    ):
        raise ValueError("its elements are not stored in row-major order")
    return str(data_key), dtype, shape


def _itemsize(dtype: str) -> int:
    return {"float64": 8, "float32": 4}.get(dtype, 2)
