"""Gated linear units that keep their input for backward in 8 bits: half of the memory, and a rounded gradient.

    y     = glu(x)                                       of x as it is
    scale = max over 2F of abs(x) / 448                  one for each token
    x'    = float8_e4m3fn(x / scale) * scale
    dx    = the gradient of glu at x'                    dbias and dw too

The numbers of float8_e4m3fn reach 448, so a token's largest number is kept to its 3 bits, and none overflows, however
large. The error of dx is that of 4 significant bits in x: a relative 3 % where x matters.

T tokens, F ffn hidden size. Saved for backward: 2TF bytes, 4T for scales, and bias and w. Floor: forward 3TF elements
and 2TF bytes, backward 3TF elements and 2TF bytes.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalith.fusions.activations import Activation
from megalith.fusions.backend import Backend, Fusion
from megalith.fusions.blocks import by_blocks
from megalith.fusions.glu import Gating, check, gradients_of, split, value_of
from megalith.fusions.library import gradients_like, register
from megalith.fusions.rows import as_rows, in_shape, wide

__all__ = [
    "FUSION",
    "dequantized",
    "glu_float8",
    "gradients_float8",
    "outputs_float8",
    "quantized",
    "register_float8",
]

_LARGEST = 448.0
_SMALLEST_SCALE = 2.0**-126  # its inverse is still a number of float32


def glu_float8(
    x: Tensor,
    *,
    activation: Activation,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
    offset: float = 0.0,
    clamp: float | None = None,
    interleaved: bool = False,
    backend: Backend | None = None,
) -> Tensor:
    """``megalith.fusions.glu`` of a packed ``x`` [..., 2F], of which backward gets float8_e4m3fn and a scale per token.

    Arguments, result and errors are those of ``glu``. Its gradient has no gradient, on any path. What is infinite or
    NaN in ``x`` is NaN in backward, and leaves the rest of its token as it is.
    """
    gating = Gating.of(activation, offset, clamp, interleaved)
    check(x, None, bias, weights, interleaved)
    compute = FUSION.path(x, backend)
    y, _, _ = compute(as_rows(x), bias, None if weights is None else as_rows(weights), *gating)
    return in_shape(y, (*x.shape[:-1], y.shape[-1]))


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` [T, N], N > 0, as bytes of float8_e4m3fn, and its scales [T, 1] in float32."""
    x = x.to(torch.float32)
    finite = x.isfinite()
    largest = x.abs().where(finite, 0.0).amax(dim=-1, keepdim=True)
    scale = (largest * (1.0 / _LARGEST)).clamp_min(_SMALLEST_SCALE)
    # clamped, as not every device saturates in the cast; NaN passes a clamp, infinity would not
    x = (x * scale.reciprocal()).clamp(-_LARGEST, _LARGEST).where(finite, torch.nan)
    return x.to(torch.float8_e4m3fn).view(torch.uint8), scale


def dequantized(stored: Tensor, scale: Tensor) -> Tensor:
    """The numbers in float32 that ``stored`` [T, N] and its scales [T, 1] stand for."""
    return stored.view(torch.float8_e4m3fn).to(torch.float32) * scale


def outputs_float8(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for y [T, F], the stored input [T, 2F] and its scales [T, 1]."""
    T = x.shape[0]
    stored = x.new_empty(x.shape, dtype=torch.uint8)  # bytes: few of torch's tools can take an operator's float8
    return x.new_empty(T, x.shape[1] // 2), stored, x.new_empty(T, 1, dtype=torch.float32)


def gradients_float8(
    dy: Tensor, stored: Tensor, scale: Tensor, bias: Tensor | None, weights: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for dx [T, 2F], dbias and dw, empty for what was not given."""
    dbias, dw = gradients_like(scale, bias, weights)[1:]
    return dy.new_empty(stored.shape), dbias, dw


def _forward(
    x: Tensor,
    bias: Tensor | None,
    weights: Tensor | None,
    activation: str,
    offset: float,
    clamp: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    y, stored, scale = outputs_float8(x)
    if y.numel() == 0:
        return y, stored, scale.fill_(1.0)
    gating = Gating(activation, offset, clamp, interleaved)

    def formula(x: Tensor, weights: Tensor | None) -> tuple[Tensor, ...]:
        return value_of(x, None, bias, weights, gating), *quantized(x)

    by_blocks(formula, (x, weights), (y, stored, scale))
    return y, stored, scale


def _backward(
    dy: Tensor,
    stored: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    weights: Tensor | None,
    activation: str,
    offset: float,
    clamp: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dbias, dw = gradients_float8(dy, stored, scale, bias, weights)
    gating = Gating(activation, offset, clamp, interleaved)

    def formula(dy: Tensor, stored: Tensor, scale: Tensor, weights: Tensor | None) -> tuple[Tensor, ...]:
        return gradients_of(dy, dequantized(stored, scale).to(wide(dy.dtype)), None, bias, weights, gating)

    halves = split(dx, interleaved)
    total = dbias.zero_().to(wide(dbias.dtype))
    outputs = halves if weights is None else (*halves, dw)
    by_blocks(formula, (dy, stored, scale, weights), outputs, () if bias is None else split(total, interleaved))
    return dx, total.to(dbias.dtype), dw


def _saves(inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
    return *outputs[1:], *inputs[1:]


register_float8 = partial(
    register,
    forward_outputs=outputs_float8,
    backward_outputs=gradients_float8,
    gradients_of=("x", "bias", "weights"),
    saves=_saves,
)
_blocked = register_float8("glu_float8_blocked", _forward, backward=_backward, opaque=True)


def _triton(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    from megalith.fusions.kernels.glu import op_float8

    return op_float8(*inputs)


GluFloat8 = Callable[[Tensor, Tensor | None, Tensor | None, str, float, float, bool], tuple[Tensor, Tensor, Tensor]]
# one operator is both: torch's own autograd of the formula would keep more than the input, and that in full
_PATHS: Mapping[Backend, GluFloat8] = {"triton": _triton, "blocked": _blocked, "reference": _blocked}
FUSION = Fusion("glu_float8", _PATHS)
