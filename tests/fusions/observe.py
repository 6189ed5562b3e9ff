"""Observes an operation from outside: the operators it calls, and the bytes it saves."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["operator_calls", "saved_bytes"]


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "megalith":
            self.found.append((function, args))
        return function(*args, **(kwargs or {}))


def operator_calls(run: Callable[[], object]) -> list[tuple[Any, tuple[Any, ...]]]:
    """The Megalith operators that ``run()`` calls, forward and backward, with their arguments."""
    with _Calls() as calls:
        run()
    return calls.found


def saved_bytes(compute: Callable[[], Any]) -> int:
    """Distinct bytes that autograd saves in the forward of ``compute()`` for its backward."""
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.data_ptr()] = max(kept.get(x.data_ptr(), 0), x.nbytes)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        compute()
    return sum(kept.values())
