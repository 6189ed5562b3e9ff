"""Tensors stored in the files of a folder, read box by box."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Set
from math import prod

import torch
from torch import Tensor

from megalith.checkpoint.box import Box, first_miscount
from megalith.checkpoint.index import INDEX, Piece, StoredTensor
from megalith.checkpoint.shard_file import ShardFile
from megalith.checkpoint.shard_header import ShardEntry
from megalith.errors import CheckpointError
from megalith.storage import Store

__all__ = ["StoredTensors"]


class StoredTensors:
    """The ``tensors`` of an index, in files of the folder ``store``. Nothing is read until requested.

    Args:
        entries: per file, the location of each key, for files that are not safetensors, or whose tensors are read under
            other keys and shapes than in their headers.
        buffers: the names in ``tensors`` that are not parameters, and have a dtype of their own.
    """

    def __init__(
        self,
        store: Store,
        tensors: Mapping[str, StoredTensor],
        entries: Mapping[str, Mapping[str, ShardEntry]] | None = None,
        buffers: Set[str] = frozenset(),
    ) -> None:
        self.store = store
        self.tensors = tensors
        self.buffers = buffers
        self._entries = entries or {}
        self._files: dict[str, ShardFile] = {}

    def only(self, wanted: Callable[[str], bool]) -> "StoredTensors":
        """Returns the tensors whose names satisfy ``wanted``."""
        kept = {name: tensor for name, tensor in self.tensors.items() if wanted(name)}
        return StoredTensors(self.store, kept, self._entries, self.buffers & kept.keys())

    @property
    def dtype(self) -> str:
        """The dtype of all parameters, by torch's name; float32 if there are several."""
        dtypes = {tensor.dtype for name, tensor in self.tensors.items() if name not in self.buffers}
        return dtypes.pop() if len(dtypes) == 1 else "float32"

    @property
    def num_parameters(self) -> int:
        """The number of elements of all parameters."""
        return sum(prod(tensor.shape) for name, tensor in self.tensors.items() if name not in self.buffers)

    @property
    def num_bytes(self) -> int:
        """The size of all tensors."""
        return sum(prod(tensor.shape) * getattr(torch, tensor.dtype).itemsize for tensor in self.tensors.values())

    def described(self) -> dict[str, Tensor]:
        """Returns all tensors on meta, by name."""
        return {
            name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")
            for name, tensor in self.tensors.items()
        }

    def fill(self, parts: Mapping[str, tuple[Box, Tensor]]) -> None:
        """Copies the box of each named tensor into the tensor paired with it, file by file.

        Raises:
            CheckpointError: a file does not match the index, or the index does not cover each element exactly once.
            StorageError: a file cannot be read.
        """
        jobs: dict[str, list[tuple[str, Piece, Box]]] = defaultdict(list)
        for name, (wanted, _) in parts.items():
            for piece, both in self._pieces(name, wanted):
                jobs[piece.file].append((name, piece, both))
        for file, pieces in sorted(jobs.items()):
            try:
                shard = self._opened(file)
                for name, piece, both in pieces:
                    wanted, tensor = parts[name]
                    dtype, target = self.tensors[name].dtype, tensor[both.slices_in(wanted)]
                    shard.read_part(piece.key, piece.box, both, dtype, target, dims=piece.dims)
            except CheckpointError as error:
                raise CheckpointError(f"{file}: {error}") from error

    def read(self, name: str) -> Tensor:
        """Returns the whole tensor ``name``, on the CPU. Raises as ``fill``."""
        stored = self.tensors[name]
        tensor = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
        self.fill({name: (Box.whole(stored.shape), tensor)})
        return tensor

    def _pieces(self, name: str, wanted: Box) -> list[tuple[Piece, Box]]:
        """Returns the pieces that overlap the box ``wanted``, each with its overlap."""
        overlaps = [(piece, both) for piece in self.tensors[name].pieces if (both := piece.box.overlap(wanted))]
        found = sum(both.num_elements for _, both in overlaps)
        if found != wanted.num_elements:
            raise CheckpointError(
                f"{INDEX} must list each of the {wanted.num_elements} elements of {name} needed here once; "
                f"it lists {found}"
            )
        if miscount := first_miscount(wanted, (both for _, both in overlaps)):
            element, count = miscount
            raise CheckpointError(
                f"{INDEX} must list each element of {name} in exactly one box; {list(element)} is in {count}"
            )
        return overlaps

    def _opened(self, file: str) -> ShardFile:
        """Returns the file, whose header is read and checked only once."""
        if file not in self._files:
            self._files[file] = ShardFile(self.store, file, self._entries.get(file))
        return self._files[file]
