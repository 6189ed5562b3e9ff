"""Which memory tensors take: what is alive, and the largest that ever was, by watching every operation of torch."""

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Inside the ``with`` block, the storages that operations make; those of tensors from before are not counted.

    An operator of the house is one operation: what it allocates and frees inside is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.largest = 0  # bytes of the largest storage so far
        self.peak = 0  # the most bytes that were alive after an operation

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
        """Bytes of storages that something still holds."""
        return sum(size for storage, size in self._made.values() if not storage.expired())
