"""Formulas of ``glu_float8``: quantization of the saved input, and the gated unit with its gradients.

T tokens, N columns of the input, F ffn hidden size.
"""

# ruff: noqa: UP044  a starred annotation would iterate over the NamedTuple class, which raises TypeError

from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from megalith.fusions.core.activations import check_activation
from megalith.fusions.core.registration import Operator, gradients_like
from megalith.fusions.core.row_wise import Runner, register_row_wise
from megalith.fusions.core.rows import fresh_like, wide
from megalith.fusions.gated.formulas import Gating, gradients_of, split, value_of

__all__ = ["OPERATOR", "Operands", "blocked", "compiled", "dequantized", "quantized"]

_LARGEST = 448.0
_SMALLEST_SCALE = 2.0**-126  # its reciprocal is still finite in float32


class Operands(NamedTuple):
    """Operands of the operator, for T rows; the last fields are those of ``Gating``."""

    x: Tensor  # [T, 2F]
    bias: Tensor | None  # [2F]
    weights: Tensor | None  # [T, 1]
    activation: str
    offset: float
    clamp: float
    interleaved: bool


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` [T, N], N > 0, as bytes of float8_e4m3fn, and its scales [T, 1] in float32."""
    x = x.to(torch.float32)
    finite = x.isfinite()
    largest = x.abs().where(finite, 0.0).amax(dim=-1, keepdim=True)
    scale = (largest * (1.0 / _LARGEST)).clamp_min(_SMALLEST_SCALE)
    # clamped because not every device saturates in the cast; NaN survives a clamp, infinity would not
    x = (x * scale.reciprocal()).clamp(-_LARGEST, _LARGEST).where(finite, torch.nan)
    return x.to(torch.float8_e4m3fn).view(torch.uint8), scale


def dequantized(stored: Tensor, scale: Tensor) -> Tensor:
    """The float32 values represented by ``stored`` [T, N] and its scales [T, 1]."""
    return stored.view(torch.float8_e4m3fn).to(torch.float32) * scale


def _outputs(
    x: Tensor,
    bias: Tensor | None,
    weights: Tensor | None,
    *options: Unpack[Gating],
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocates y [T, F], the stored input [T, 2F] and its scales [T, 1]."""
    check_activation(Gating(*options).activation)
    T = x.shape[0]
    stored = fresh_like(x, torch.uint8)  # bytes: few of torch's tools support operators that return float8
    return x.new_empty(T, x.shape[1] // 2), stored, x.new_empty(T, 1, dtype=torch.float32)


def _gradients(
    dy: Tensor,
    stored: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    weights: Tensor | None,
    *options: Unpack[Gating],
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocates dx [T, 2F], dbias and dw, the latter two empty if there is no bias or weight."""
    dbias, dw = gradients_like(scale, bias, weights)[1:]
    return dy.new_empty(stored.shape), dbias, dw


def _saves(outputs: tuple[Tensor, ...], *operands: Unpack[Operands]) -> tuple[object, ...]:
    return *outputs[1:], *operands[1:]


OPERATOR = Operator(_outputs, _gradients, of=("x", "bias", "weights"), saves=_saves)


def _forward(
    run: Runner, x: Tensor, bias: Tensor | None, weights: Tensor | None, *options: Unpack[Gating]
) -> tuple[Tensor, Tensor, Tensor]:
    y, stored, scale = _outputs(x, bias, weights, *options)
    if y.numel() == 0:
        return y, stored, scale.fill_(1.0)
    gating, acc = Gating(*options), wide(x.dtype)

    def formula(x: Tensor, weights: Tensor | None) -> tuple[Tensor, ...]:
        gate, up = split(x.to(acc), gating.interleaved)
        return value_of(gate, up, bias, weights, gating), *quantized(x)

    run.by_blocks(formula, (x, weights), (y, stored, scale))
    return y, stored, scale


def _backward(
    run: Runner,
    dy: Tensor,
    stored: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    weights: Tensor | None,
    *options: Unpack[Gating],
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dbias, dw = _gradients(dy, stored, scale, bias, weights, *options)
    gating, acc = Gating(*options), wide(dy.dtype)

    def formula(dy: Tensor, stored: Tensor, scale: Tensor, weights: Tensor | None) -> tuple[Tensor, ...]:
        gate, up = split(dequantized(stored, scale).to(acc), gating.interleaved)
        found = gradients_of(dy.to(acc), gate, up, bias, weights, gating)
        return found if bias is None else (*found, *found[:2])

    halves = split(dx, gating.interleaved)
    total = dbias.zero_().to(wide(dbias.dtype))
    outputs = halves if weights is None else (*halves, dw)
    sums = () if bias is None else split(total, gating.interleaved)
    run.by_blocks(formula, (dy, stored, scale, weights), outputs, sums)
    return dx, total.to(dbias.dtype), dw


blocked, compiled = register_row_wise(OPERATOR, "glu_float8", _forward, _backward)
