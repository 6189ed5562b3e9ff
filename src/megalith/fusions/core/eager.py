"""Computes in eager mode without the registered operator: its dispatch costs more than the work on small tensors.

Forward and backward of an operator with a dozen operands that launches nothing take 2.1 to 2.4 times what a
``torch.autograd.Function`` takes that allocates the same, and called as here 1.2 to 1.4 times
(``python -m benchmarks.fusions --calls --only``). Whatever needs to see an operator still gets it: torch.compile and
export, dispatch modes, torch.func, meta tensors, and subclasses of Tensor.
"""

from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter

from megalith.torch_compat import any_requires_grad, below_autograd, is_intercepted

__all__ = ["NON_TENSOR_TYPES", "call_in_backward", "eager_or_operator", "recorded"]

Y = TypeVar("Y")
# of most operands that are no tensors; isinstance(x, Tensor) takes several times as long to say no
NON_TENSOR_TYPES = frozenset((NoneType, bool, int, float, str, list, tuple))


def eager_or_operator(
    operator: Callable[..., Y], implementation: Callable[..., Y], differentiable: Callable[..., Y] | None = None
) -> Callable[..., Y]:
    """A function of positional operands that calls ``operator``, or in eager mode what gives the same without it.

    Args:
        operator: registered with torch.
        implementation: of ``operator``; called where no gradient is recorded.
        differentiable: called where one is; by default ``operator``, which then has none and says so in backward.
    """
    with_gradient = operator if differentiable is None else differentiable

    def call(*inputs: Any) -> Y:
        if is_intercepted():
            return operator(*inputs)
        for x in inputs:
            kind = type(x)
            if kind in NON_TENSOR_TYPES:
                continue
            if kind is Tensor or kind is Parameter:
                if x.is_meta:
                    return operator(*inputs)
            elif isinstance(x, Tensor):  # with a behaviour of its own
                return operator(*inputs)
        if torch.is_grad_enabled() and any_requires_grad(*inputs):
            return with_gradient(*inputs)
        with below_autograd():
            return implementation(*inputs)

    call.implementation = implementation  # type: ignore[attr-defined]
    return call


def call_in_backward(gradient: Any, dy: Sequence[Tensor | None], operands: Sequence[Any]) -> Any:
    """``gradient``, of ``eager_or_operator``, of the ``operands`` of a backward; fewer questions where ``dy`` is plain.

    What forward has saved is plain wherever ``dy`` is.
    """
    if torch.is_grad_enabled() or is_intercepted():
        return gradient(*operands)
    for g in dy:
        if g is not None and type(g) is not Tensor:
            return gradient(*operands)
    with below_autograd():
        return gradient.implementation(*operands)


def recorded(
    name: str,
    implementation: Callable[..., Y],
    setup_context: Callable[[Any, tuple[Any, ...], Y], None],
    backward: Callable[..., Any],
) -> Callable[..., Y]:
    """``implementation`` with a gradient: both functions are what ``torch.library.register_autograd`` takes."""

    def forward(ctx: Any, *inputs: Any) -> Y:
        with below_autograd():
            output = implementation(*inputs)
            setup_context(ctx, inputs, output)
        return output

    # forward takes ctx, as a setup_context of its own would make every call inspect a signature
    function: Any = type(name, (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})
    apply: Callable[..., Y] = function.apply
    return apply
