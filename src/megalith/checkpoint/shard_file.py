"""One ``.safetensors`` file: written in one pass with one tensor in memory at a time, read in parts.

The safetensors library is not used because it needs all tensors on the CPU for writing, and a file system path for
reading.
"""

from collections.abc import Callable, Iterator, Mapping
from math import prod

import numpy as np
import torch
from torch import Tensor

from megalith.checkpoint.box import Box
from megalith.checkpoint.shard_header import DTYPES, ShardEntry, header_of, read_header
from megalith.errors import CheckpointError
from megalith.storage import Buffer, FileRecord, Recorder, Store

__all__ = ["ShardFile", "shard_parts", "write_shard"]

_BLOCK = 8 << 20  # bytes per read, unless a row of the innermost dimension is longer


def write_shard(
    store: Store, name: str, tensors: Mapping[str, Tensor], read: Callable[[str], Tensor] | None = None
) -> FileRecord:
    """Writes ``tensors`` (any device, any strides) by key to the file ``name``, durably. Raises StorageError.

    With ``read``, ``tensors`` may be on meta: each is read by key when it is written, and released before the next.
    """
    recorder = Recorder(shard_parts(tensors, read))
    store.write(name, recorder)
    return recorder.record()


def shard_parts(tensors: Mapping[str, Tensor], read: Callable[[str], Tensor] | None = None) -> Iterator[Buffer]:
    """Yields the content of the file that holds ``tensors``: its header, then one tensor after another."""
    # wide elements first, so that each tensor is aligned to its element size
    keys = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))
    yield header_of({key: tensors[key] for key in keys})
    read = read or tensors.__getitem__
    for key in keys:
        # release the view: a consumer that still holds it would keep this tensor alive while the next one is read
        with _bytes_of(read(key).detach().cpu().contiguous()) as content:
            yield content


class ShardFile:
    """The file ``name`` of the checkpoint ``store``, with its header read and checked.

    ``entries``: where its tensors are, by key, if the file has another format; by default read from the header.

    Raises:
        CheckpointError: here and in every method, the file is not as expected.
        StorageError: here and in every method, the file cannot be read.
    """

    def __init__(self, store: Store, name: str, entries: Mapping[str, ShardEntry] | None = None) -> None:
        self._store = store
        self._name = name
        self._entries = read_header(store, name) if entries is None else entries

    def read_part(
        self, key: str, box: Box, part: Box, dtype: str, into: Tensor, *, dims: tuple[int, ...] | None = None
    ) -> None:
        """Copies ``part`` of the stored ``box`` under ``key`` to ``into``, of any dtype, device and strides.

        Besides ``into``, it holds one block of a few megabytes at a time. ``dims``: permutation of the stored tensor.

        Raises:
            CheckpointError: what is stored is not a ``box`` of ``dtype`` (torch's name).
        """
        if dims is not None:
            box, part, into = box.permuted(dims), part.permuted(dims), into.permute(dims)
        if key not in self._entries:
            raise CheckpointError(f"tensor {key} is not in the file")
        entry = self._entries[key]
        if (entry.dtype, entry.shape) != (DTYPES[dtype], box.shape):
            raise CheckpointError(
                f"{key} must be {DTYPES[dtype]} {list(box.shape)} according to the index; the file has {entry.dtype} "
                f"{list(entry.shape)}"
            )
        self._copy(getattr(torch, dtype), entry.begin, entry.shape, part.slices_in(box), into)

    def _copy(
        self, dtype: torch.dtype, begin: int, shape: tuple[int, ...], slices: tuple[slice, ...], into: Tensor
    ) -> None:
        """Copies ``slices`` of the array of ``dtype`` and ``shape`` that begins at byte ``begin`` of the file.

        Reads directly into ``into`` if the memory layouts match, otherwise in blocks of rows of the first dimension;
        recurses into rows longer than a block.
        """
        if not shape:
            self._copy(dtype, begin, (1,), (slice(0, 1),), into.view(1))
            return
        first, row_bytes = slices[0].start, prod(shape[1:]) * dtype.itemsize
        whole_rows = into.shape[1:] == shape[1:]
        if whole_rows and into.dtype == dtype and into.device.type == "cpu" and into.is_contiguous():
            self._store.read_into(self._name, begin + first * row_bytes, _bytes_of(into))
        elif row_bytes > _BLOCK and len(shape) > 1:
            for i in range(len(into)):
                self._copy(dtype, begin + (first + i) * row_bytes, shape[1:], slices[1:], into[i])
        else:
            num_rows = max(1, _BLOCK // row_bytes)
            for start in range(0, len(into), num_rows):
                target = into[start : start + num_rows]
                place = begin + (first + start) * row_bytes
                target.copy_(self._rows(dtype, place, (len(target), *shape[1:]), slices[1:], whole_rows))

    def _rows(
        self, dtype: torch.dtype, begin: int, shape: tuple[int, ...], slices: tuple[slice, ...], whole_rows: bool
    ) -> Tensor:
        """Returns ``slices`` of each row of the array of ``shape`` at byte ``begin``; a map reads no other columns."""
        # mapped anew for each block: touched pages count as memory of the process until they are unmapped
        if not whole_rows and (content := self._store.map(self._name)) is not None:
            array = np.frombuffer(content, f"i{dtype.itemsize}", prod(shape), begin).reshape(shape)
            return torch.from_numpy(array[:, *slices].copy()).view(dtype)
        rows = torch.empty(shape, dtype=dtype)
        self._store.read_into(self._name, begin, _bytes_of(rows))
        return rows[:, *slices]


def _bytes_of(tensor: Tensor) -> memoryview:
    """Returns the memory of a contiguous CPU tensor."""
    content: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return content
