"""Bypasses the registered operator in eager mode, where its dispatch would cost more than the work on small tensors.

Forward plus backward of an operator with a dozen operands and no launches takes 2.1 to 2.4 times as long as a
``torch.autograd.Function`` with the same allocations, and 1.2 to 1.4 times when called as here
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

from megalith.torch_compat.tensors import any_requires_grad, below_autograd, is_intercepted

__all__ = ["NON_TENSOR_TYPES", "call_in_backward", "eager_or_operator", "recorded"]

Y = TypeVar("Y")
# types of most non-tensor operands; isinstance(x, Tensor) takes several times as long to return False
NON_TENSOR_TYPES = frozenset((NoneType, bool, int, float, str, list, tuple))


def eager_or_operator(
    operator: Callable[..., Y], implementation: Callable[..., Y], differentiable: Callable[..., Y] | None = None
) -> Callable[..., Y]:
    """Returns a function of positional operands that calls ``operator``, or its undispatched equivalent in eager mode.

    Args:
        operator: registered with torch.
        implementation: what ``operator`` runs; called when no gradient is recorded.
        differentiable: called when one is; by default ``operator``, which has no gradient and raises in backward.
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
            elif isinstance(x, Tensor):  # a subclass
                return operator(*inputs)
        if torch.is_grad_enabled() and any_requires_grad(*inputs):
            return with_gradient(*inputs)
        with below_autograd():
            return implementation(*inputs)

    call.implementation = implementation  # type: ignore[attr-defined]
    return call


def call_in_backward(gradient: Any, dy: Sequence[Tensor | None], operands: Sequence[Any]) -> Any:
    """Calls ``gradient``, made by ``eager_or_operator``, from a backward; checks only ``dy`` for subclasses.

    Tensors saved by forward are plain tensors whenever ``dy`` is.
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
    """``implementation`` with a gradient; the last two arguments are those of ``torch.library.register_autograd``."""

    def forward(ctx: Any, *inputs: Any) -> Y:
        with below_autograd():
            output = implementation(*inputs)
            setup_context(ctx, inputs, output)
        return output

    # forward takes ctx: with a separate setup_context, torch would inspect a signature in every call
    function: Any = type(name, (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})
    apply: Callable[..., Y] = function.apply
    return apply
