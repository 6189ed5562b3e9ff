"""Stands in for a CUDA graph on a CPU: records calls of operators, and repeats them on the same memory."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["OperatorRecorder"]


class OperatorRecorder(TorchDispatchMode):
    """A recorder. Like a GPU, it leaves no values behind by a capture, and refuses to read one in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Sequence[Any], dict[str, Any], Any]] = []
        self.num_replays = 0
        self._made: dict[int, Tensor] = {}  # by address of the memory, which stays allocated
        self._overwritten: list[tuple[Tensor, Tensor]] = []

    def warm_up(self, function: Callable[[], Any]) -> Any:
        return function()

    def capture(self, function: Callable[[], Any]) -> Any:
        with self:
            result = function()
        for tensor, before in reversed(self._overwritten):
            tensor.copy_(before)
        for tensor in self._made.values():
            tensor.untyped_storage().fill_(0xFF)  # NaN, or -1
        return result

    def replay(self) -> None:
        self.num_replays += 1
        with torch.no_grad():
            for operator, args, kwargs, result in self.calls:
                for into, computed in zip(_tensors(result), _tensors(operator(*args, **kwargs)), strict=True):
                    if _address(into) != _address(computed):
                        into.copy_(computed)

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _reads_values(operator, args):
            raise RuntimeError("operation not permitted when stream is capturing\nCompile with TORCH_USE_CUDA_DSA")
        for tensor in _written(operator, args, kwargs):
            if _address(tensor) not in self._made:
                self._overwritten.append((tensor.detach(), tensor.detach().clone()))
        before = {_address(tensor) for tensor in _tensors((args, kwargs))}
        result = operator(*args, **kwargs)
        self.calls.append((operator, args, kwargs, result))
        self._made |= {_address(x): x.detach() for x in _tensors(result) if _address(x) not in before}
        return result


def _reads_values(operator: Any, args: Sequence[Any]) -> bool:
    if operator is torch.ops.aten.index.Tensor:  # its tags say so even for integers
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    return not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.isdisjoint(operator.tags)


def _written(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    arguments = operator._schema.arguments
    by_name = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    for argument in arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(by_name.get(argument.name))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
