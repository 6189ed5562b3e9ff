"""GEGLU in the tanh form, and quick GEGLU with an offset: ``megalith.fusions.glu`` under the names of the field.

    geglu       y = gelu(gate + bias) * (up + bias)                       gelu in the tanh form
    quick geglu y = a * sigmoid(1.702 a) * (l + offset) * w               a, l = gate + bias, up + bias, clamped

Shazeer 2020, "GLU Variants Improve Transformer", arXiv:2002.05202; the second is that of gpt-oss (offset 1, clamp 7).
The clamp always comes after the bias. Functions without ``_impl`` are references in plain torch, on the whole tensor;
floor and what is saved are those of ``glu``.
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
    """GEGLU, in the tanh form, of gate and up, packed in ``input``.

    Args:
        input: [..., 2F], floating: gate, then up.
        bias: [2F], or None.
        interleaved: ``input`` and ``bias`` hold gate and up interleaved.
        backend: the path to take; by default that of ``use(...)``, else the one of the table.

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
    """Quick GEGLU of gate and up, packed in ``input``, times one weight per token.

    Args:
        input: [..., 2F], floating: gate, then up.
        bias: [2F], or None.
        weights: [..., 1], or None: the router's probability, often in float32.
        fp8_input_store: keep the input for backward in 8 bits, with a scale per token; see ``glu_float8``.
        linear_offset: added to up, after its clamp (1 in gpt-oss); has no gradient.
        clamp_value: the gate's upper bound and up's bounds on both sides, after the bias (7 in gpt-oss).
        interleaved: ``input`` and ``bias`` hold gate and up interleaved, as Hugging Face's gpt-oss does.
        backend: the path to take; by default that of ``use(...)``, else the one of the table.

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
    """``gelu(gate) * up`` [..., F] of ``y`` [..., 2F], in the tanh form."""
    return glu(y, activation="gelu_tanh", backend="reference")


def bias_geglu(bias: Tensor, y: Tensor) -> Tensor:
    """``geglu`` of ``y + bias``, the bias first, added before anything is rounded."""
    return glu(y, activation="gelu_tanh", bias=bias, backend="reference")


def geglu_back(g: Tensor, y: Tensor) -> Tensor:
    """The gradient of ``y`` [..., 2F], of the upstream ``g`` [..., F]."""
    return glu_back(g, y, activation="gelu_tanh")[0]


def bias_geglu_back(g: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    """The gradient of ``y`` [..., 2F]; that of ``bias`` is its sum over tokens."""
    return glu_back(g, y, activation="gelu_tanh", bias=bias)[0]


def quick_gelu(y: Tensor) -> Tensor:
    """``y * sigmoid(1.702 y)`` of each element, rounded once."""
    check_floating(y=y)
    a = y.to(wide(y.dtype))
    return (a * torch.sigmoid(1.702 * a)).to(y.dtype)


def quick_geglu(y: Tensor, linear_offset: float = 0.0) -> Tensor:
    """``quick_gelu(gate) * (up + linear_offset)`` [..., F] of ``y`` [..., 2F]."""
    return glu(y, activation="quick_gelu", offset=linear_offset, backend="reference")


def weighted_quick_geglu(y: Tensor, weights: Tensor, linear_offset: float = 0.0) -> Tensor:
    """``quick_geglu(y) * weights``, of one weight [..., 1] per token, in the dtype of ``y``."""
    return glu(y, activation="quick_gelu", weights=weights, offset=linear_offset, backend="reference")


def weighted_bias_quick_geglu(y: Tensor, bias: Tensor, weights: Tensor, linear_offset: float = 0.0) -> Tensor:
    """``weighted_quick_geglu`` of ``y + bias``."""
    return glu(y, activation="quick_gelu", bias=bias, weights=weights, offset=linear_offset, backend="reference")


def quick_geglu_back(g: Tensor, y: Tensor, linear_offset: float = 0.0) -> Tensor:
    """The gradient of ``y`` [..., 2F], of the upstream ``g`` [..., F]."""
    return glu_back(g, y, activation="quick_gelu", offset=linear_offset)[0]


def weighted_quick_geglu_back(
    g: Tensor, y: Tensor, weights: Tensor, linear_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The gradients of ``y`` [..., 2F] and of ``weights`` [..., 1], each in the dtype of its tensor."""
    dy, _, _, dw = back(g, y, None, None, weights, Gating.of("quick_gelu", linear_offset))
    return dy, dw


def weighted_bias_quick_geglu_back(
    g: Tensor, y: Tensor, bias: Tensor, weights: Tensor, linear_offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of ``y`` [..., 2F], of ``bias`` [2F], summed over tokens, and of ``weights`` [..., 1]."""
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

    ``linear_offset`` is a number, or a tensor of one, for which the host waits; it has no gradient.
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
