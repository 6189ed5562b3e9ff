"""Triton kernels of the gated linear units.

T tokens (rows), F ffn hidden size (columns of gate and of up). Rows may be strided; the columns of gate and up are
contiguous, or interleaved. A packed tensor is passed as two pointers into the same memory.
"""

# ruff: noqa: UP044  a starred annotation would iterate over the NamedTuple class, which raises TypeError

import math
from typing import Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalith.fusions.core.grids import cdiv
from megalith.fusions.core.kernels.activations import activation, activation_and_slope, tile_of
from megalith.fusions.core.kernels.float8 import casts_natively, decode_e4m3, encode_e4m3
from megalith.fusions.core.registration import wrap_triton
from megalith.fusions.core.rows import contiguous_columns, rows_per_sum
from megalith.fusions.gated.float8_formulas import OPERATOR as OPERATOR_FLOAT8
from megalith.fusions.gated.formulas import OPERATOR, Gating

__all__ = ["op", "op_float8"]

_STAGES = 1  # pipeline stages of the loads of rows in backward; more would cost registers
_SMALLEST_SCALE = tl.constexpr(2.0**-126)  # its inverse is still finite in float32
_INVERSE_LARGEST = tl.constexpr(1.0 / 448.0)


@triton.jit
def _load(gate_ptr, up_ptr, start, F, INTERLEAVED: tl.constexpr, BLOCK_F: tl.constexpr):
    """A block of gate and of up from column ``start`` on, as they are stored; 0 beyond ``F``."""
    if INTERLEAVED:  # whole pairs, so that loads are as wide as memory
        col = 2 * start + tl.arange(0, 2 * BLOCK_F)
        gate, up = tl.split(tl.reshape(tl.load(gate_ptr + col, mask=col < 2 * F, other=0), (BLOCK_F, 2)))
    else:
        col = start + tl.arange(0, BLOCK_F)
        gate = tl.load(gate_ptr + col, mask=col < F, other=0)
        up = tl.load(up_ptr + col, mask=col < F, other=0)
    return gate, up


@triton.jit
def _store(gate_ptr, up_ptr, gate, up, start, F, INTERLEAVED: tl.constexpr, BLOCK_F: tl.constexpr):
    if INTERLEAVED:
        col = 2 * start + tl.arange(0, 2 * BLOCK_F)
        tl.store(gate_ptr + col, tl.interleave(gate, up), mask=col < 2 * F)
    else:
        col = start + tl.arange(0, BLOCK_F)
        tl.store(gate_ptr + col, gate, mask=col < F)
        tl.store(up_ptr + col, up, mask=col < F)


@triton.jit
def _bias(bias_ptr, start, F, INTERLEAVED: tl.constexpr, BLOCK_F: tl.constexpr):
    """A block of both halves of the bias; 0 without one."""
    gate = tl.zeros([BLOCK_F], dtype=tl.float32)
    up = tl.zeros([BLOCK_F], dtype=tl.float32)
    if bias_ptr is not None:
        gate_bias, up_bias = _load(bias_ptr, bias_ptr + F, start, F, INTERLEAVED, BLOCK_F)
        gate += gate_bias.to(tl.float32)
        up += up_bias.to(tl.float32)
    return gate, up


@triton.jit
def _value(a, linear, KIND: tl.constexpr, OFFSET: tl.constexpr, CLAMP: tl.constexpr):
    if CLAMP is not None:
        a = tl.where(a > CLAMP, CLAMP, a)
        linear = tl.where(linear > CLAMP, CLAMP, tl.where(linear < -CLAMP, -CLAMP, linear))
    return activation(a, KIND) * (linear + OFFSET)


@triton.jit
def _forward_kernel(
    gate_ptr, up_ptr, bias_ptr, w_ptr, y_ptr, gate_stride, up_stride, F,
    KIND: tl.constexpr, OFFSET: tl.constexpr, CLAMP: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # row * stride passes 2^31 in a large batch
    start = tl.program_id(1) * BLOCK_F
    gate, up = _load(gate_ptr + row * gate_stride, up_ptr + row * up_stride, start, F, INTERLEAVED, BLOCK_F)
    gate_bias, up_bias = _bias(bias_ptr, start, F, INTERLEAVED, BLOCK_F)
    y = _value(gate.to(tl.float32) + gate_bias, up.to(tl.float32) + up_bias, KIND, OFFSET, CLAMP)
    if w_ptr is not None:
        y *= tl.load(w_ptr + row).to(tl.float32)
    col = start + tl.arange(0, BLOCK_F)
    tl.store(y_ptr + row * F + col, y, mask=col < F)


@triton.jit
def _forward_float8_kernel(
    x_ptr, bias_ptr, w_ptr, y_ptr, stored_ptr, scale_ptr, x_stride, F,
    KIND: tl.constexpr, OFFSET: tl.constexpr, CLAMP: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_F: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """y of one row; then the row again, which the cache still holds, in float8 by the largest number found in it."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    stored_ptr += row * 2 * F
    largest = tl.zeros([BLOCK_F], dtype=tl.float32)
    for start in range(0, F, BLOCK_F):
        gate, up = _load(x_ptr, x_ptr + F, start, F, INTERLEAVED, BLOCK_F)
        gate, up = gate.to(tl.float32), up.to(tl.float32)
        largest = tl.maximum(largest, tl.maximum(_finite_size(gate), _finite_size(up)))
        gate_bias, up_bias = _bias(bias_ptr, start, F, INTERLEAVED, BLOCK_F)
        y = _value(gate + gate_bias, up + up_bias, KIND, OFFSET, CLAMP)
        if w_ptr is not None:
            y *= tl.load(w_ptr + row).to(tl.float32)
        col = start + tl.arange(0, BLOCK_F)
        tl.store(y_ptr + row * F + col, y, mask=col < F)
    scale = tl.maximum(tl.max(largest, axis=0) * _INVERSE_LARGEST, _SMALLEST_SCALE)
    tl.store(scale_ptr + row, scale)
    inverse = tl.div_rn(tl.full((), 1.0, tl.float32), scale)
    for start in range(0, F, BLOCK_F):
        gate, up = _load(x_ptr, x_ptr + F, start, F, INTERLEAVED, BLOCK_F)
        gate = encode_e4m3(gate.to(tl.float32) * inverse, NATIVE)
        up = encode_e4m3(up.to(tl.float32) * inverse, NATIVE)
        _store(stored_ptr, stored_ptr + F, gate, up, start, F, INTERLEAVED, BLOCK_F)


@triton.jit
def _finite_size(x):
    size = tl.abs(x)
    return tl.where(size < float("inf"), size, 0.0)


@triton.jit
def _backward_kernel(
    dy_ptr, gate_ptr, up_ptr, scale_ptr, bias_ptr, w_ptr, dgate_ptr, dup_ptr, dbias_ptr, dw_ptr,
    dy_stride, gate_stride, up_stride, dx_stride, T, F, num_rows,
    KIND: tl.constexpr, OFFSET: tl.constexpr, CLAMP: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_F: tl.constexpr,
    NATIVE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One block of columns of ``num_rows`` rows: dx of each, its part of each dw, and one part of dbias."""
    group, tile, num_tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    start = tile * BLOCK_F
    col = start + tl.arange(0, BLOCK_F)
    mask = col < F
    gate_bias, up_bias = _bias(bias_ptr, start, F, INTERLEAVED, BLOCK_F)
    da_sum = tl.zeros([BLOCK_F], dtype=tl.float32)
    dl_sum = tl.zeros([BLOCK_F], dtype=tl.float32)
    for i in tl.range(0, tl.minimum(num_rows, T - group * num_rows), num_stages=STAGES):
        row = group * num_rows + i  # in 64 bits, which a loop over rows need not keep
        gate, up = _load(gate_ptr + row * gate_stride, up_ptr + row * up_stride, start, F, INTERLEAVED, BLOCK_F)
        if scale_ptr is not None:
            scale = tl.load(scale_ptr + row)
            gate, up = decode_e4m3(gate, NATIVE) * scale, decode_e4m3(up, NATIVE) * scale
        a, linear = gate.to(tl.float32) + gate_bias, up.to(tl.float32) + up_bias
        dy = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0).to(tl.float32)
        a_passes, linear_passes = mask, mask
        if CLAMP is not None:
            a_passes = a <= CLAMP  # false for NaN, as in torch
            linear_passes = (linear <= CLAMP) & (linear >= -CLAMP)
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
            da = tl.where(a_passes, da, 0.0)
            dl = tl.where(linear_passes, dl, 0.0)
        _store(dgate_ptr + row * dx_stride, dup_ptr + row * dx_stride, da, dl, start, F, INTERLEAVED, BLOCK_F)
        da_sum += da
        dl_sum += dl
    if dbias_ptr is not None:
        _store(dbias_ptr + group * 2 * F, dbias_ptr + group * 2 * F + F, da_sum, dl_sum, start, F, INTERLEAVED, BLOCK_F)


def _forward(
    x: Tensor, up: Tensor | None, bias: Tensor | None, weights: Tensor | None, *options: Unpack[Gating]
) -> Tensor:
    y, gating = OPERATOR.outputs(x, up, bias, weights, *options), Gating(*options)
    T, F = y.shape
    if y.numel():
        gate, linear = _halves(x, up)
        block, num_warps = tile_of(F)
        wrap_triton(_forward_kernel)[(T, cdiv(F, block))](
            gate, linear, _contiguous(bias), _contiguous(weights), y, gate.stride(0), linear.stride(0), F,
            KIND=gating.activation, OFFSET=gating.offset, CLAMP=_bound(gating.clamp), INTERLEAVED=gating.interleaved,
            BLOCK_F=block, num_warps=num_warps,
        )  # fmt: skip
    return y


def _forward_float8(
    x: Tensor, bias: Tensor | None, weights: Tensor | None, *options: Unpack[Gating]
) -> tuple[Tensor, Tensor, Tensor]:
    y, stored, scale = OPERATOR_FLOAT8.outputs(x, bias, weights, *options)
    gating = Gating(*options)
    T, F = y.shape
    if y.numel() == 0:
        return y, stored, scale.fill_(1.0)
    x = contiguous_columns(x)
    block, num_warps = tile_of(F)
    wrap_triton(_forward_float8_kernel)[(T,)](
        x, _contiguous(bias), _contiguous(weights), y, stored, scale, x.stride(0), F,
        KIND=gating.activation, OFFSET=gating.offset, CLAMP=_bound(gating.clamp), INTERLEAVED=gating.interleaved,
        BLOCK_F=block, NATIVE=casts_natively(x), num_warps=num_warps,
    )  # fmt: skip
    return y, stored, scale


def _backward(
    dy: Tensor, x: Tensor, up: Tensor | None, bias: Tensor | None, weights: Tensor | None, *options: Unpack[Gating]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    results = OPERATOR.gradients(dy, x, up, bias, weights, *options)
    return _launch_backward(dy, x, up, None, bias, weights, results, Gating(*options))


def _backward_float8(
    dy: Tensor, stored: Tensor, scale: Tensor, bias: Tensor | None, weights: Tensor | None, *options: Unpack[Gating]
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dbias, dw = OPERATOR_FLOAT8.gradients(dy, stored, scale, bias, weights, *options)
    results, gating = (dx, dx, dbias, dw), Gating(*options)
    dx, _, dbias, dw = _launch_backward(dy, stored, None, scale, bias, weights, results, gating)
    return dx, dbias, dw


def _launch_backward(
    dy: Tensor,
    x: Tensor,
    up: Tensor | None,
    scale: Tensor | None,
    bias: Tensor | None,
    weights: Tensor | None,
    results: tuple[Tensor, Tensor, Tensor, Tensor],
    gating: Gating,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Fills ``results``, except dbias and dw, which are summed from partial sums and returned instead."""
    dx, dup, dbias, dw = results
    T, F = dy.shape
    if dy.numel() == 0:
        return dx, dup, dbias.zero_(), dw.zero_()
    block, num_warps = tile_of(F)
    num_tiles = cdiv(F, block)
    num_rows = 1 if bias is None else rows_per_sum(T, num_tiles)  # without a sum over rows, more programs are better
    groups = cdiv(T, num_rows)
    sums = None if bias is None else dy.new_empty(groups, 2 * F, dtype=torch.float32)
    parts = None if weights is None else dy.new_empty(T, num_tiles, dtype=torch.float32)
    dy = contiguous_columns(dy)
    gate, linear = _halves(x, up)
    dgate, dlinear = _halves(dx, None if up is None else dup)
    wrap_triton(_backward_kernel)[(groups, num_tiles)](
        dy, gate, linear, scale, _contiguous(bias), _contiguous(weights), dgate, dlinear, sums, parts,
        dy.stride(0), gate.stride(0), linear.stride(0), dgate.stride(0), T, F, num_rows,
        KIND=gating.activation, OFFSET=gating.offset, CLAMP=_bound(gating.clamp), INTERLEAVED=gating.interleaved,
        BLOCK_F=block, NATIVE=scale is not None and casts_natively(x), STAGES=_STAGES, num_warps=num_warps,
    )  # fmt: skip
    if sums is not None:
        dbias = sums.sum(dim=0).to(dbias.dtype)
    if parts is not None:
        dw = parts.sum(dim=-1, keepdim=True).to(dw.dtype)
    return dx, dup, dbias, dw


def _halves(x: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Views of ``x`` or ``up`` whose rows start at gate and at up; interleaved rows start at gate."""
    x = contiguous_columns(x)
    return (x, x[:, x.shape[1] // 2 :]) if up is None else (x, contiguous_columns(up))


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _bound(clamp: float) -> float | None:
    return None if clamp == math.inf else clamp


op = OPERATOR.register("glu", _forward, _backward)
op_float8 = OPERATOR_FLOAT8.register("glu_float8", _forward_float8, _backward_float8)
