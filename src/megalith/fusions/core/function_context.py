"""The ``ctx`` type of the families' ``torch.autograd.Function`` classes."""

from typing import Any, Protocol

from torch import Tensor

from megalith.fusions.core.names import Backend

__all__ = ["Context"]


class Context(Protocol):
    """torch's ``ctx``, plus the path that backward takes and the numbers that it needs besides tensors."""

    backend: Backend
    options: tuple[Any, ...]
    needs_input_grad: tuple[bool, ...]

    @property
    def saved_tensors(self) -> tuple[Any, ...]: ...
    def save_for_backward(self, *tensors: Tensor | None) -> None: ...
