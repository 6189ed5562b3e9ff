"""GELU of an input plus bias; the bias gradient is computed in the same pass.

    a     = x + bias
    y     = gelu(a)         tanh approximation: a s(2 u), u = sqrt(2/pi) (a + 0.044715 a^3); exact: a Phi(a)
    dx    = dy * gelu'(a)
    dbias = sum over T of dx

Hendrycks and Gimpel 2016, "Gaussian Error Linear Units (GELUs)", arXiv:1606.08415; s = sigmoid, Phi the cumulative
normal distribution. GPT-2 uses the tanh approximation.

T tokens (leading dimensions flattened), F ffn hidden size. Saved for backward: x and bias.
Lower bound: forward 2TF elements, backward 3TF.

On a CPU, exact GELU in 16 bits without a bias is torch's operator: about twice the speed of the compiled formula, and
nothing to compile. Its Phi has an absolute error of up to 4e-7, more than the rounding of y below about -3 in float16
and -3.5 in bfloat16; at -5.6 and below, y is 0.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalith.errors import ConfigError
from megalith.fusions.activation.bias_gelu_formulas import (
    blocked,
    compiled,
    gradient_of,
    reference,
    reference_back,
)
from megalith.fusions.core.checks import check_floating, check_one_device, check_rows, check_shape
from megalith.fusions.core.dispatch import Backend, Fusion, Operand
from megalith.fusions.core.function_context import Context
from megalith.fusions.core.registry import registered
from megalith.fusions.core.rows import as_rows, in_shape, not_a_view, rows_together

__all__ = [
    "EXACT_16_BIT",
    "FUSION",
    "Approximate",
    "GeLUFunction",
    "bias_gelu",
    "bias_gelu_back",
    "bias_gelu_impl",
    "should_fuse_bias",
]

Approximate = Literal["tanh", "none"]
_ACTIVATIONS = {"tanh": "gelu_tanh", "none": "gelu"}


def bias_gelu_impl(
    input: Tensor, bias: Tensor | None, *, approximate: Approximate = "tanh", backend: Backend | None = None
) -> Tensor:
    """Returns ``gelu(input + bias)``, by default with the tanh approximation.

    Args:
        input: [..., F], floating point; rows may be strided.
        bias: [F], or None.
        approximate: "tanh", or "none" for exact GELU, as in torch. The two differ by up to 5e-4.
        backend: the path to take; defaults to that of ``use(...)``, else to the operation's default for the device.

    Returns:
        [..., F] in the dtype of ``input``.

    Raises:
        ShapeError: the tensors do not fit together.
        ConfigError: an unknown approximation.
        BackendError: ``backend`` cannot run on ``input``.
    """
    activation = _check(input, bias, approximate)
    compute = _operation(input, bias, activation).path(input, backend)
    (x,) = rows_together(input)
    return in_shape(compute(x, bias, activation), input.shape)


def should_fuse_bias(x: Operand, approximate: Approximate) -> bool:
    """Returns whether ``bias_gelu_impl`` should add the bias of tensors like ``x``, rather than the product before it.

    False where GELU without a bias takes torch's operator.
    """
    return not (_is_exact_16_bit(x, _ACTIVATIONS[approximate]) and EXACT_16_BIT.choose(x) == "aten")


class GeLUFunction(torch.autograd.Function):
    """``apply(input, bias)`` is ``bias_gelu_impl(input, bias)``, under the usual name."""

    @staticmethod
    def forward(ctx: Context, input: Tensor, bias: Tensor | None) -> Tensor:
        ctx.backend = FUSION.choose_for_function(input)
        ctx.save_for_backward(input, bias)
        return not_a_view(bias_gelu_impl(input, bias, backend=ctx.backend))

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, Tensor | None]:
        input, bias = ctx.saved_tensors
        dx, dbias = FUSION.backs[ctx.backend](as_rows(grad_output), as_rows(input), bias, _ACTIVATIONS["tanh"])
        return dx.view(input.shape), None if bias is None else dbias


def bias_gelu(bias: Tensor | None, y: Tensor, *, approximate: Approximate = "tanh") -> Tensor:
    """Reference forward of ``y`` [..., F], with the bias as first argument; result in the dtype of ``y``."""
    return reference(y, bias, _check(y, bias, approximate))


@torch.no_grad()
def bias_gelu_back(g: Tensor, bias: Tensor | None, y: Tensor, *, approximate: Approximate = "tanh") -> Tensor:
    """Reference backward: the gradient of ``y`` [..., F], given the upstream ``g``; its sum is that of ``bias``.

    Not differentiable.
    """
    activation = _check(y, bias, approximate)
    check_shape("g", g, y.shape, "like y")
    return gradient_of(g, y, bias, activation).to(y.dtype)


def _triton(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    from megalith.fusions.activation.kernels.bias_gelu import op

    return op(x, bias, activation)


def _triton_back(dy: Tensor, x: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    from megalith.fusions.activation.kernels.bias_gelu import op

    return op.back(dy, x, bias, activation)


def _torch_gelu(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return torch.nn.functional.gelu(x)


_PATHS: Mapping[Backend, Callable[[Tensor, Tensor | None, str], Tensor]] = {
    "triton": _triton,
    "compile": compiled,
    "blocked": blocked,
    "reference": reference,
}
_BACKS: Mapping[Backend, Callable[..., tuple[Tensor, Tensor]]] = {
    "triton": _triton_back,
    "compile": compiled.back,
    "blocked": blocked.back,
    "reference": reference_back,
}
_DEFAULTS: Mapping[str, Sequence[Backend]] = {"cuda": ("triton",), "cpu": ("compile", "blocked")}
FUSION = registered(Fusion("bias_gelu", _PATHS, defaults=_DEFAULTS, backs=_BACKS))
EXACT_16_BIT = registered(
    Fusion("exact_gelu_16_bit", {**_PATHS, "aten": _torch_gelu}, defaults={**_DEFAULTS, "cpu": ("aten",)})
)


def _operation(x: Tensor, bias: Tensor | None, activation: str) -> Fusion[Callable[..., Tensor]]:
    # torch's operator would round x + bias, and in float32 its error would show
    return EXACT_16_BIT if bias is None and _is_exact_16_bit(x, activation) else FUSION


def _is_exact_16_bit(x: Operand, activation: str) -> bool:
    return activation == "gelu" and x.dtype.itemsize == 2


def _check(input: Tensor, bias: Tensor | None, approximate: str) -> str:
    """Checks the arguments and returns the activation named by ``approximate``."""
    if approximate not in _ACTIVATIONS:
        raise ConfigError(f'approximate must be "tanh" or "none"; got {approximate!r}')
    check_floating(input=input, bias=bias)
    check_one_device(input=input, bias=bias)
    check_rows("input", input, "F")
    check_shape("bias", bias, input.shape[-1:], "one for each column of input")
    return _ACTIVATIONS[approximate]
