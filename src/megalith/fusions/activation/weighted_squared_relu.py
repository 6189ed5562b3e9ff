"""Squared ReLU scaled by one weight per token, with one pass each for forward and backward.

    y  = relu(x)^2 * w
    dx = 2 * dy * w * relu(x)
    dw = sum over F of dy * relu(x)^2

Squared ReLU: So et al. 2021, "Primer", arXiv:2109.08668. The weight is the router's probability for the token.

T tokens (leading dimensions flattened), F ffn hidden size. Saved for backward: x and w.
Lower bound: forward 2TF elements of x and 4T bytes, backward 3TF elements and 8T bytes (w in float32).
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalith.fusions.activation.weighted_squared_relu_formulas import (
    blocked,
    compiled,
    weighted_squared_relu,
    weighted_squared_relu_back,
)
from megalith.fusions.core.checks import check_floating, check_one_device, check_rows, check_shape
from megalith.fusions.core.dispatch import Backend, Fusion
from megalith.fusions.core.function_context import Context
from megalith.fusions.core.registry import registered
from megalith.fusions.core.rows import as_rows, in_shape, not_a_view, rows_together

__all__ = [
    "FUSION",
    "WeightedSquaredReLUFunction",
    "weighted_squared_relu",
    "weighted_squared_relu_back",
    "weighted_squared_relu_impl",
]


def weighted_squared_relu_impl(input: Tensor, weights: Tensor, backend: Backend | None = None) -> Tensor:
    """Returns ``relu(input)^2 * weights``, with one weight per token.

    Args:
        input: [..., F], floating point; rows may be strided.
        weights: [..., 1], same leading sizes and device; often float32 while ``input`` is bfloat16.
        backend: the path to take; defaults to that of ``use(...)``, else to the operation's default for the device.

    Returns:
        [..., F] in the dtype of ``input``.

    Raises:
        ShapeError: the tensors do not fit together.
        BackendError: ``backend`` cannot run on ``input``.
    """
    check_floating(input=input, weights=weights)
    check_one_device(input=input, weights=weights)
    check_rows("input", input, "F")
    check_shape("weights", weights, (*input.shape[:-1], 1), f"one for each token of input {list(input.shape)}")
    compute = FUSION.path(input, backend)
    return in_shape(compute(*rows_together(input, weights)), input.shape)


class WeightedSquaredReLUFunction(torch.autograd.Function):
    """``apply(input, weights)`` is ``weighted_squared_relu_impl``, under the usual name."""

    @staticmethod
    def forward(ctx: Context, input: Tensor, weights: Tensor) -> Tensor:
        ctx.backend = FUSION.choose_for_function(input)
        ctx.save_for_backward(input, weights)
        return not_a_view(weighted_squared_relu_impl(input, weights, backend=ctx.backend))

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        input, weights = ctx.saved_tensors
        dx, dw = FUSION.backs[ctx.backend](as_rows(grad_output), as_rows(input), as_rows(weights))
        return dx.view(input.shape), dw.view(weights.shape)


def _triton(x: Tensor, weights: Tensor) -> Tensor:
    from megalith.fusions.activation.kernels.weighted_squared_relu import op

    return op(x, weights)


def _triton_back(dy: Tensor, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    from megalith.fusions.activation.kernels.weighted_squared_relu import op

    return op.back(dy, x, weights)


_PATHS: Mapping[Backend, Callable[[Tensor, Tensor], Tensor]] = {
    "triton": _triton,
    "compile": compiled,
    "blocked": blocked,
    "reference": weighted_squared_relu,
}
_BACKS: Mapping[Backend, Callable[..., tuple[Tensor, Tensor]]] = {
    "triton": _triton_back,
    "compile": compiled.back,
    "blocked": blocked.back,
    "reference": weighted_squared_relu_back,
}
_DEFAULTS: Mapping[str, Sequence[Backend]] = {"cuda": ("triton",), "cpu": ("compile", "blocked")}
FUSION = registered(Fusion("weighted_squared_relu", _PATHS, defaults=_DEFAULTS, backs=_BACKS))
