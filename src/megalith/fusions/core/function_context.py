"""What the ``torch.autograd.Function`` classes of the families keep from forward to backward."""

from typing import Any, Protocol

from torch import Tensor

from megalith.fusions.core.names import Backend

__all__ = ["Context"]


class Context(Protocol):
    """The ``ctx`` of torch, with the path that backward takes too, and the numbers that it needs beside tensors."""

    backend: Backend
    options: tuple[Any, ...]
    needs_input_grad: tuple[bool, ...]

    @property
    def saved_tensors(self) -> tuple[Any, ...]: ...
    def save_for_backward(self, *tensors: Tensor | None) -> None: ...
