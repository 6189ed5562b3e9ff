"""Memory held by tensors, current and peak, tracked through every torch operation."""

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Tracks storages created by operations in the ``with`` block; those of earlier tensors are not counted.

    A Megalith operator counts as one operation: what it allocates and frees internally is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.largest = 0  # bytes of the largest storage so far
        self.peak = 0  # the most bytes alive after any operation

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        before = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in before:
                storage = x.untyped_storage()
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
        self.peak = max(self.peak, self.alive())
        return result

    def alive(self) -> int:
        """Bytes of storages that are still referenced."""
        return sum(size for storage, size in self._made.values() if not storage.expired())
