"""GEGLU (tanh approximation) and quick GEGLU with an offset: ``megalith.fusions.glu`` under Megatron's names.

    geglu       y = gelu(gate + bias) * (up + bias)                       gelu with the tanh approximation
    quick geglu y = a * sigmoid(1.702 a) * (l + offset) * w               a, l = gate + bias, up + bias, clamped

Shazeer 2020, "GLU Variants Improve Transformer", arXiv:2002.05202; the second is that of gpt-oss (offset 1, clamp 7).
The clamp is always applied after the bias. Functions without ``_impl`` are references in plain torch, on the whole
tensor. For memory traffic and what is saved, see ``glu``.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalith.fusions.core.checks import check_floating
from megalith.fusions.core.dispatch import Backend
from megalith.fusions.core.function_context import Context
from megalith.fusions.core.rows import wide
from megalith.fusions.gated import functions
from megalith.fusions.gated.formulas import Gating
from megalith.fusions.gated.glu import back, glu, glu_back
from megalith.fusions.gated.glu_float8 import glu_float8

__all__ = [
    "BiasGeGLUFunction",
    "GeGLUFunction",
    "WeightedBiasQuickGeGLUFunction",
    "WeightedQuickGeGLUFunction",
    "bias_geglu",
    "bias_geglu_back",
    "bias_geglu_impl",
    "geglu",
    "geglu_back",
    "quick_geglu",
    "quick_geglu_back",
    "quick_gelu",
    "weighted_bias_quick_geglu",
    "weighted_bias_quick_geglu_back",
    "weighted_bias_quick_geglu_impl",
    "weighted_quick_geglu",
    "weighted_quick_geglu_back",
]

_GELU_TANH = Gating.of("gelu_tanh")


def bias_geglu_impl(
    input: Tensor, bias: Tensor | None, *, interleaved: bool = False, backend: Backend | None = None
) -> Tensor:
    """Returns GEGLU with the tanh approximation, of gate and up packed in ``input``.

    Args:
        input: [..., 2F], floating point: gate, then up.
        bias: [2F], or None.
        interleaved: the columns of ``input`` and ``bias`` alternate between gate and up.
        backend: the path to take; defaults to that of ``use(...)``, else to the operation's default for the device.

    Returns:
        [..., F] in the dtype of ``input``.

    Raises:
        ShapeError: the tensors do not fit together.
        BackendError: ``backend`` cannot run on ``input``.
    """
    return glu(input, activation="gelu_tanh", bias=bias, interleaved=interleaved, backend=backend)


def weighted_bias_quick_geglu_impl(
    input: Tensor,
    bias: Tensor | None,
    weights: Tensor | None,
    fp8_input_store: bool = False,
    linear_offset: float = 0.0,
    clamp_value: float | None = None,
    *,
    interleaved: bool = False,
    backend: Backend | None = None,
) -> Tensor:
    """Returns quick GEGLU of gate and up packed in ``input``, times one weight per token.

    Args:
        input: [..., 2F], floating point: gate, then up.
        bias: [2F], or None.
        weights: [..., 1], or None: the router's probability, often in float32.
        fp8_input_store: save the input for backward in 8 bits, with a scale per token; see ``glu_float8``.
        linear_offset: added to up after clamping (1 in gpt-oss); not differentiable.
        clamp_value: upper bound of the gate, and bound of up on both sides, applied after the bias (7 in gpt-oss).
        interleaved: the columns of ``input`` and ``bias`` alternate between gate and up, as in Hugging Face's gpt-oss.
        backend: the path to take; defaults to that of ``use(...)``, else to the operation's default for the device.

    Returns:
        [..., F] in the dtype of ``input``.

    Raises:
        ShapeError: the tensors do not fit together.
        ConfigError: a clamp that is not positive.
        BackendError: ``backend`` cannot run on ``input``.
    """
    compute = glu_float8 if fp8_input_store else glu
    return compute(
        input,
        activation="quick_gelu",
        bias=bias,
        weights=weights,
        offset=linear_offset,
        clamp=clamp_value,
        interleaved=interleaved,
        backend=backend,
    )


def geglu(y: Tensor) -> Tensor:
    """Returns ``gelu(gate) * up`` [..., F] for ``y`` [..., 2F], with the tanh approximation."""
    return glu(y, activation="gelu_tanh", backend="reference")


def bias_geglu(bias: Tensor, y: Tensor) -> Tensor:
    """Returns ``geglu`` of ``y + bias``; the sum is not rounded."""
    return glu(y, activation="gelu_tanh", bias=bias, backend="reference")


def geglu_back(g: Tensor, y: Tensor) -> Tensor:
    """Returns the gradient of ``y`` [..., 2F], given the upstream gradient ``g`` [..., F]."""
    return glu_back(g, y, activation="gelu_tanh")[0]


def bias_geglu_back(g: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    """Returns the gradient of ``y`` [..., 2F]; the gradient of ``bias`` is its sum over tokens."""
    return glu_back(g, y, activation="gelu_tanh", bias=bias)[0]


def quick_gelu(y: Tensor) -> Tensor:
    """Returns ``y * sigmoid(1.702 y)`` elementwise, rounded once."""
    check_floating(y=y)
    a = y.to(wide(y.dtype))
    return (a * torch.sigmoid(1.702 * a)).to(y.dtype)


def quick_geglu(y: Tensor, linear_offset: float = 0.0) -> Tensor:
    """Returns ``quick_gelu(gate) * (up + linear_offset)`` [..., F] for ``y`` [..., 2F]."""
    return glu(y, activation="quick_gelu", offset=linear_offset, backend="reference")


def weighted_quick_geglu(y: Tensor, weights: Tensor, linear_offset: float = 0.0) -> Tensor:
    """``quick_geglu(y) * weights``, with one weight [..., 1] per token, in the dtype of ``y``."""
    return glu(y, activation="quick_gelu", weights=weights, offset=linear_offset, backend="reference")


def weighted_bias_quick_geglu(y: Tensor, bias: Tensor, weights: Tensor, linear_offset: float = 0.0) -> Tensor:
    """``weighted_quick_geglu`` of ``y + bias``."""
    return glu(y, activation="quick_gelu", bias=bias, weights=weights, offset=linear_offset, backend="reference")


def quick_geglu_back(g: Tensor, y: Tensor, linear_offset: float = 0.0) -> Tensor:
    """Returns the gradient of ``y`` [..., 2F], given the upstream gradient ``g`` [..., F]."""
    return glu_back(g, y, activation="quick_gelu", offset=linear_offset)[0]


def weighted_quick_geglu_back(
    g: Tensor, y: Tensor, weights: Tensor, linear_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of ``y`` [..., 2F] and of ``weights`` [..., 1], each in the dtype of its tensor."""
    dy, _, _, dw = back(g, y, None, None, weights, Gating.of("quick_gelu", linear_offset))
    return dy, dw


def weighted_bias_quick_geglu_back(
    g: Tensor, y: Tensor, bias: Tensor, weights: Tensor, linear_offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of ``y`` [..., 2F], of ``bias`` [2F], summed over tokens, and of ``weights`` [..., 1]."""
    dy, _, dbias, dw = back(g, y, None, bias, weights, Gating.of("quick_gelu", linear_offset))
    return dy, dbias, dw


class GeGLUFunction(torch.autograd.Function):
    """``apply(input)`` is ``bias_geglu_impl`` without a bias."""

    @staticmethod
    def forward(ctx: Context, input: Tensor) -> Tensor:
        return functions.forward(ctx, input, None, None, _GELU_TANH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad_output: Tensor) -> Tensor:
        return functions.backward(ctx, grad_output)[0]


class BiasGeGLUFunction(torch.autograd.Function):
    """``apply(input, bias)`` is ``bias_geglu_impl``."""

    @staticmethod
    def forward(ctx: Context, input: Tensor, bias: Tensor | None) -> Tensor:
        return functions.forward(ctx, input, bias, None, _GELU_TANH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, Tensor | None]:
        dx, dbias, _ = functions.backward(ctx, grad_output)
        return dx, dbias


class WeightedQuickGeGLUFunction(torch.autograd.Function):
    """``apply(input, weights, fp8_input_store, linear_offset)`` is quick GEGLU without a bias.

    ``linear_offset`` is a number, or a one-element tensor, which causes a host sync; it is not differentiable.
    """

    @staticmethod
    def forward(
        ctx: Context,
        input: Tensor,
        weights: Tensor | None,
        fp8_input_store: bool = False,
        linear_offset: float | Tensor = 0.0,
    ) -> Tensor:
        gating = Gating.of("quick_gelu", float(linear_offset))
        return functions.forward(ctx, input, None, weights, gating, fp8_input_store)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        dx, _, dw = functions.backward(ctx, grad_output)
        return dx, dw, None, None


class WeightedBiasQuickGeGLUFunction(torch.autograd.Function):
    """``apply(input, bias, weights, fp8_input_store, linear_offset)`` is ``weighted_bias_quick_geglu_impl``.

    ``linear_offset`` is as in ``WeightedQuickGeGLUFunction``.
    """

    @staticmethod
    def forward(
        ctx: Context,
        input: Tensor,
        bias: Tensor | None,
        weights: Tensor | None,
        fp8_input_store: bool = False,
        linear_offset: float | Tensor = 0.0,
    ) -> Tensor:
        gating = Gating.of("quick_gelu", float(linear_offset))
        return functions.forward(ctx, input, bias, weights, gating, fp8_input_store)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        dx, dbias, dw = functions.backward(ctx, grad_output)
        return dx, dbias, dw, None, None
