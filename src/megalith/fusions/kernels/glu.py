"""Triton kernels of the gated linear units.

T tokens (rows), F ffn hidden size (columns of gate and of up). Rows may be strided; the columns of gate and up are
COLUMN apart: 1, or 2 where they are interleaved. A packed tensor is two views of one memory here.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalith.fusions.kernels.activations import activation, activation_and_slope
from megalith.fusions.library import gradients_like, register, wrap_triton
from megalith.fusions.rows import contiguous_columns, rows_per_sum

__all__ = ["op"]

_BLOCK_F = 1024  # untuned


@triton.jit
def _load(x_ptr, bias_ptr, row, col, stride, mask, COLUMN: tl.constexpr):
    x = tl.load(x_ptr + row * stride + col * COLUMN, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + col * COLUMN, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def _forward_kernel(
    gate_ptr, up_ptr, gate_bias_ptr, up_bias_ptr, w_ptr, y_ptr, gate_stride, up_stride, F,
    KIND: tl.constexpr, OFFSET: tl.constexpr, CLAMP: tl.constexpr, COLUMN: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # row * stride passes 2^31 in a large batch
    col = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = col < F
    a = _load(gate_ptr, gate_bias_ptr, row, col, gate_stride, mask, COLUMN)
    linear = _load(up_ptr, up_bias_ptr, row, col, up_stride, mask, COLUMN)
    if CLAMP is not None:
        a = tl.where(a > CLAMP, CLAMP, a)
        linear = tl.where(linear > CLAMP, CLAMP, tl.where(linear < -CLAMP, -CLAMP, linear))
    y = activation(a, KIND) * (linear + OFFSET)
    if w_ptr is not None:
        y *= tl.load(w_ptr + row).to(tl.float32)
    tl.store(y_ptr + row * F + col, y, mask=mask)


@triton.jit
def _backward_kernel(
    dy_ptr, gate_ptr, up_ptr, gate_bias_ptr, up_bias_ptr, w_ptr, dgate_ptr, dup_ptr, dbias_ptr, dw_ptr,
    dy_stride, gate_stride, up_stride, dx_stride, T, F, num_rows,
    KIND: tl.constexpr, OFFSET: tl.constexpr, CLAMP: tl.constexpr, COLUMN: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """One block of columns of ``num_rows`` rows: dx of each, its part of each dw, and one part of dbias."""
    group, tile, num_tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    col = tile * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = col < F
    da_sum = tl.zeros([BLOCK_F], dtype=tl.float32)
    dl_sum = tl.zeros([BLOCK_F], dtype=tl.float32)
    for row in range(group * num_rows, tl.minimum(group * num_rows + num_rows, T)):
        a = _load(gate_ptr, gate_bias_ptr, row, col, gate_stride, mask, COLUMN)
        linear = _load(up_ptr, up_bias_ptr, row, col, up_stride, mask, COLUMN)
        dy = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0).to(tl.float32)
        a_open, linear_open = mask, mask
        if CLAMP is not None:
            a_open = a <= CLAMP
            linear_open = (linear <= CLAMP) & (linear >= -CLAMP)
            a = tl.where(a > CLAMP, CLAMP, a)
            linear = tl.where(linear > CLAMP, CLAMP, tl.where(linear < -CLAMP, -CLAMP, linear))
        value, slope = activation_and_slope(a, KIND)
        linear += OFFSET
        if w_ptr is not None:
            dw = tl.sum(tl.where(mask, dy * value * linear, 0.0), axis=0)
            tl.store(dw_ptr + row * num_tiles + tile, dw)
            dy *= tl.load(w_ptr + row).to(tl.float32)
        da = dy * slope * linear
        dl = dy * value
        if CLAMP is not None:
            da = tl.where(a_open, da, 0.0)
            dl = tl.where(linear_open, dl, 0.0)
        tl.store(dgate_ptr + row * dx_stride + col * COLUMN, da, mask=mask)
        tl.store(dup_ptr + row * dx_stride + col * COLUMN, dl, mask=mask)
        da_sum += da
        dl_sum += dl
    if dbias_ptr is not None:
        tl.store(dbias_ptr + group * 2 * F + col, da_sum, mask=mask)
        tl.store(dbias_ptr + group * 2 * F + F + col, dl_sum, mask=mask)


def _forward(
    x: Tensor,
    up: Tensor | None,
    bias: Tensor | None,
    weights: Tensor | None,
    activation: str,
    offset: float,
    clamp: float,
    interleaved: bool,
) -> Tensor:
    y = _outputs(x, up)
    T, F = y.shape
    if y.numel():
        gate, linear = _halves(x, up, interleaved)
        gate_bias, up_bias = (None, None) if bias is None else _split(bias.contiguous(), interleaved)
        wrap_triton(_forward_kernel)[(T, triton.cdiv(F, _BLOCK_F))](
            gate, linear, gate_bias, up_bias, None if weights is None else weights.contiguous(), y,
            gate.stride(0), linear.stride(0), F,
            KIND=activation, OFFSET=offset, CLAMP=None if clamp == math.inf else clamp,
            COLUMN=2 if interleaved else 1, BLOCK_F=_BLOCK_F,
        )  # fmt: skip
    return y


def _backward(
    dy: Tensor,
    x: Tensor,
    up: Tensor | None,
    bias: Tensor | None,
    weights: Tensor | None,
    activation: str,
    offset: float,
    clamp: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dx, dup, dbias, dw = gradients_like(x, up, bias, weights)
    T, F = dy.shape
    if dy.numel() == 0:
        return dx, dup, dbias.zero_(), dw.zero_()
    num_tiles = triton.cdiv(F, _BLOCK_F)
    num_rows = 1 if bias is None else rows_per_sum(T, num_tiles)
    groups = triton.cdiv(T, num_rows)
    sums = None if bias is None else dy.new_empty(groups, 2, F, dtype=torch.float32)
    parts = None if weights is None else dy.new_empty(T, num_tiles, dtype=torch.float32)
    dy = contiguous_columns(dy)
    gate, linear = _halves(x, up, interleaved)
    gate_bias, up_bias = (None, None) if bias is None else _split(bias.contiguous(), interleaved)
    dgate, dlinear = (dx, dup) if up is not None else _split(dx, interleaved)
    wrap_triton(_backward_kernel)[(groups, num_tiles)](
        dy, gate, linear, gate_bias, up_bias, None if weights is None else weights.contiguous(),
        dgate, dlinear, sums, parts, dy.stride(0), gate.stride(0), linear.stride(0), dgate.stride(0), T, F, num_rows,
        KIND=activation, OFFSET=offset, CLAMP=None if clamp == math.inf else clamp,
        COLUMN=2 if interleaved else 1, BLOCK_F=_BLOCK_F,
    )  # fmt: skip
    if sums is not None:
        total = sums.sum(dim=0)  # [2, F]
        dbias = (total.t() if interleaved else total).flatten().to(dbias.dtype)
    if parts is not None:
        dw = parts.sum(dim=-1, keepdim=True).to(dw.dtype)
    return dx, dup, dbias, dw


def _outputs(x: Tensor, up: Tensor | None, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] if up is not None else x.shape[1] // 2)


def _gradients(
    dy: Tensor, x: Tensor, up: Tensor | None, bias: Tensor | None, weights: Tensor | None, *_: Any
) -> tuple[Tensor, ...]:
    return gradients_like(x, up, bias, weights)


def _halves(x: Tensor, up: Tensor | None, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Gate and up as they lie in memory."""
    return _split(contiguous_columns(x), interleaved) if up is None else (contiguous_columns(x), contiguous_columns(up))


def _split(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    F = x.shape[-1] // 2
    return (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :F], x[..., F:])


op = register("glu", _forward, _outputs, _backward, _gradients, gradients_of=("x", "up", "bias", "weights"))
