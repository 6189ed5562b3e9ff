"""One ``.safetensors`` file: written in one pass that holds one tensor at a time, read part by part.

The safetensors library wants all tensors on the CPU to write them, and a path in a file system to read them.
"""

from collections.abc import Iterator, Mapping
from math import prod

import torch
from torch import Tensor

from megalith.checkpoint.box import Box
from megalith.checkpoint.shard_header import DTYPES, header_of, read_header
from megalith.errors import CheckpointError
from megalith.storage import Buffer, FileRecord, Recorder, Store

__all__ = ["ShardFile", "shard_parts", "write_shard"]

_BLOCK = 8 << 20  # bytes of one read, unless a row of the innermost dimension is longer


def write_shard(store: Store, name: str, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Writes ``tensors`` (any device, any strides) by their keys as the file ``name``, durably. Raises StorageError."""
    recorder = Recorder(shard_parts(tensors))
    store.write(name, recorder)
    return recorder.record()


def shard_parts(tensors: Mapping[str, Tensor]) -> Iterator[Buffer]:
    """The content of the file that holds ``tensors``: its header, then one tensor after the other."""
    # wide elements first, so that each tensor begins at a multiple of its element size
    keys = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))
    yield header_of({key: tensors[key] for key in keys})
    for key in keys:
        yield _bytes_of(tensors[key].detach().cpu().contiguous())


class ShardFile:
    """The file ``name`` of the checkpoint ``store``, with its header read and checked.

    Raises:
        CheckpointError: here and in every method, the file is not what it should be.
        StorageError: likewise, it cannot be read.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name
        self._entries = read_header(store, name)

    def read_part(self, key: str, box: Box, part: Box, dtype: str) -> Tensor:
        """``part`` of the stored ``box`` under ``key``, on the CPU. Reads little more than that part.

        Raises:
            CheckpointError: what is stored is not a ``box`` of ``dtype`` (torch's name).
        """
        if key not in self._entries:
            raise CheckpointError(f"it has no tensor {key}")
        entry = self._entries[key]
        if (entry.dtype, entry.shape) != (DTYPES[dtype], box.shape):
            raise CheckpointError(
                f"{key} must be {DTYPES[dtype]} {list(box.shape)} by the index; the file has {entry.dtype} "
                f"{list(entry.shape)}"
            )
        content = torch.empty(part.shape, dtype=getattr(torch, dtype))
        self._fill(content, entry.begin, entry.shape, part.slices_in(box))
        return content

    def _fill(self, into: Tensor, begin: int, shape: tuple[int, ...], slices: tuple[slice, ...]) -> None:
        """Copies ``slices`` of the array of ``shape`` that begins at byte ``begin`` of the file.

        An array is read by whole rows of its first dimension, many at a time; where they are long, each in this way.
        """
        if not shape or (into.is_contiguous() and into.shape[1:] == shape[1:]):
            skipped = slices[0].start * prod(shape[1:]) if shape else 0
            self._store.read_into(self._name, begin + skipped * into.element_size(), _bytes_of(into))
            return
        row_bytes = prod(shape[1:]) * into.element_size()
        if row_bytes > _BLOCK:
            for i, row in enumerate(into):
                self._fill(row, begin + (slices[0].start + i) * row_bytes, shape[1:], slices[1:])
            return
        num_rows = _BLOCK // row_bytes
        for start in range(0, len(into), num_rows):
            part = into[start : start + num_rows]
            rows = torch.empty(len(part), *shape[1:], dtype=into.dtype)
            self._store.read_into(self._name, begin + (slices[0].start + start) * row_bytes, _bytes_of(rows))
            part.copy_(rows[:, *slices[1:]])


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    content: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return content
