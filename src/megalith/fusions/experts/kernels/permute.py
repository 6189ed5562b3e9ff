"""Triton kernels of fused_permute.

A program handles one token and one tile of columns: it reads the token once and writes its rows, or reads the rows and
writes the token. T tokens, R rows, H hidden (columns), S slots of a token. Rows may be strided; columns are contiguous.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalith.fusions.core.grids import cdiv, next_power_of_2
from megalith.fusions.core.registration import wrap_triton
from megalith.fusions.core.rows import contiguous_columns
from megalith.fusions.experts.permute_formulas import PERMUTE_OPERATOR, UNPERMUTE_OPERATOR

__all__ = ["permute_op", "unpermute_op"]

_BLOCK_H = 2048  # untuned
_BLOCK_DOT = 8192  # untuned: columns of a tile that also sums dy . permuted; whole rows in most models
_BLOCK_R = 64  # untuned: rows that one program searches for gaps


@triton.jit
def _next(rows, row):
    """The least of ``rows`` above ``row``: a token's rows in the order of their experts, however its slots are."""
    return tl.min(tl.where(rows > row, rows, 2147483647), axis=0)


@triton.jit
def _clear_gaps(out_ptr, token_of_ptr, first, R, H, col, BLOCK_R: tl.constexpr):
    """Writes zeros to those of BLOCK_R rows from ``first`` on that are no token's; returns them, and -1 for others."""
    rows = first + tl.arange(0, BLOCK_R)
    rows = tl.where(tl.load(token_of_ptr + rows, mask=rows < R, other=0) < 0, rows, -1)
    row = tl.full((), -1, dtype=tl.int32)
    for _ in range(tl.sum((rows >= 0).to(tl.int32), axis=0)):
        row = _next(rows, row)
        tl.store(out_ptr + row.to(tl.int64) * H + col, tl.zeros([col.shape[0]], dtype=tl.float32), mask=col < H)
    return rows


@triton.jit
def _permute_kernel(
    x_ptr, probs_ptr, row_of_ptr, token_of_ptr, out_ptr, weights_ptr, x_stride, prob_row, prob_slot, T, R, H, S,
    BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    col = tile * BLOCK_H + tl.arange(0, BLOCK_H)
    if token < T:
        slot = tl.arange(0, BLOCK_S)
        rows = tl.load(row_of_ptr + token * S + slot, mask=slot < S, other=-1)
        x = tl.load(x_ptr + token * x_stride + col, mask=col < H, other=0.0)
        row = tl.full((), -1, dtype=tl.int32)
        for _ in range(tl.sum((rows >= 0).to(tl.int32), axis=0)):
            row = _next(rows, row)
            tl.store(out_ptr + row.to(tl.int64) * H + col, x, mask=col < H)
        if weights_ptr is not None:
            mine = (rows >= 0) & (tile == 0)
            weight = tl.load(probs_ptr + token * prob_row + slot * prob_slot, mask=mine, other=0.0)
            tl.store(weights_ptr + rows, weight, mask=mine)
    else:
        gaps = _clear_gaps(out_ptr, token_of_ptr, (tl.program_id(0) - T) * BLOCK_R, R, H, col, BLOCK_R)
        if weights_ptr is not None:
            tl.store(weights_ptr + gaps, tl.zeros([BLOCK_R], dtype=tl.float32), mask=(gaps >= 0) & (tile == 0))


@triton.jit
def _unpermute_kernel(
    x_ptr, probs_ptr, row_of_ptr, out_ptr, dweights_ptr, dprobs_ptr, x_stride, prob_row, prob_slot, dweight_stride,
    H, S, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    col = tile * BLOCK_H + tl.arange(0, BLOCK_H)
    slot = tl.arange(0, BLOCK_S)
    rows = tl.load(row_of_ptr + token * S + slot, mask=slot < S, other=-1)
    if probs_ptr is not None:
        weights = tl.load(probs_ptr + token * prob_row + slot * prob_slot, mask=rows >= 0, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK_H], dtype=tl.float32)
    row = tl.full((), -1, dtype=tl.int32)
    for _ in range(tl.sum((rows >= 0).to(tl.int32), axis=0)):
        row = _next(rows, row)
        x = tl.load(x_ptr + row.to(tl.int64) * x_stride + col, mask=col < H, other=0.0).to(tl.float32)
        if probs_ptr is not None:
            x *= tl.sum(tl.where(rows == row, weights, 0.0), axis=0)
        total += x
    tl.store(out_ptr + token * H + col, total, mask=col < H)
    if dprobs_ptr is not None:
        first = tile == 0
        dprobs = tl.load(dweights_ptr + rows.to(tl.int64) * dweight_stride, mask=(rows >= 0) & first, other=0.0)
        tl.store(dprobs_ptr + token * S + slot, dprobs, mask=(slot < S) & first)


@triton.jit
def _unpermute_back_kernel(
    dy_ptr, x_ptr, probs_ptr, row_of_ptr, token_of_ptr, dx_ptr, dprobs_ptr, dy_stride, x_stride, prob_row, prob_slot,
    R, H, S: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    BLOCK_S: tl.constexpr = triton.next_power_of_2(S) if S > 0 else 1
    T = tl.num_programs(0) - tl.cdiv(R, BLOCK_R)  # programs after those of tokens clear gaps
    token = tl.program_id(0).to(tl.int64)
    tile, num_tiles = tl.program_id(1), tl.num_programs(1)
    col = tile * BLOCK_H + tl.arange(0, BLOCK_H)
    if token < T:
        slot = tl.arange(0, BLOCK_S)
        rows = tl.load(row_of_ptr + token * S + slot, mask=slot < S, other=-1)
        weights = tl.load(probs_ptr + token * prob_row + slot * prob_slot, mask=rows >= 0, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + token * dy_stride + col, mask=col < H, other=0.0).to(tl.float32)
        dprobs = tl.zeros([BLOCK_S], dtype=tl.float32)
        row = tl.full((), -1, dtype=tl.int32)
        for _ in range(tl.sum((rows >= 0).to(tl.int32), axis=0)):
            row = _next(rows, row)
            x = tl.load(x_ptr + row.to(tl.int64) * x_stride + col, mask=col < H, other=0.0).to(tl.float32)
            dprobs = tl.where(rows == row, tl.sum(dy * x, axis=0), dprobs)
            weight = tl.sum(tl.where(rows == row, weights, 0.0), axis=0)
            tl.store(dx_ptr + row.to(tl.int64) * H + col, dy * weight, mask=col < H)
        tl.store(dprobs_ptr + (token * S + slot) * num_tiles + tile, dprobs, mask=slot < S)
    else:
        _clear_gaps(dx_ptr, token_of_ptr, (tl.program_id(0) - T) * BLOCK_R, R, H, col, BLOCK_R)


def _permute(tokens: Tensor, probs: Tensor | None, row_of: Tensor, token_of: Tensor) -> tuple[Tensor, Tensor]:
    permuted, weights = PERMUTE_OPERATOR.outputs(tokens, probs, row_of, token_of)
    _spread(tokens, probs, row_of, token_of, permuted, None if probs is None else weights)
    return permuted, weights


def _spread(
    x: Tensor, probs: Tensor | None, row_of: Tensor, token_of: Tensor, out: Tensor, weights: Tensor | None
) -> None:
    (T, S), (R, H) = row_of.shape, out.shape
    x = contiguous_columns(x)
    prob_strides = (0, 0) if probs is None else probs.stride()
    block_h = min(_BLOCK_H, _power(H))
    if num_programs := T + cdiv(R, _BLOCK_R):
        wrap_triton(_permute_kernel)[(num_programs, max(1, cdiv(H, block_h)))](
            x, probs, row_of, token_of, out, weights, x.stride(0), *prob_strides, T, R, H, S,
            BLOCK_S=_power(S), BLOCK_H=block_h, BLOCK_R=_BLOCK_R,
        )  # fmt: skip


def _permute_back(dpermuted: Tensor, dweights: Tensor, row_of: Tensor, has_probs: bool) -> tuple[Tensor, Tensor]:
    dtokens, dprobs = PERMUTE_OPERATOR.gradients(dpermuted, dweights, row_of, has_probs)
    gradients = (dweights, dprobs) if has_probs else (None, None)
    _gather(dpermuted, None, row_of, dtokens, *gradients)
    return dtokens, dprobs


def _unpermute(permuted: Tensor, probs: Tensor | None, row_of: Tensor, token_of: Tensor) -> Tensor:
    y: Tensor = UNPERMUTE_OPERATOR.outputs(permuted, probs, row_of, token_of)
    _gather(permuted, probs, row_of, y, None, None)
    return y


def _gather(
    x: Tensor, probs: Tensor | None, row_of: Tensor, out: Tensor, dweights: Tensor | None, dprobs: Tensor | None
) -> None:
    (T, S), H = row_of.shape, out.shape[1]
    x = contiguous_columns(x)
    prob_strides = (0, 0) if probs is None else probs.stride()
    dweight_stride = 0 if dweights is None else dweights.stride(0)
    block_h = min(_BLOCK_H, _power(H))
    if T:
        wrap_triton(_unpermute_kernel)[(T, max(1, cdiv(H, block_h)))](
            x, probs, row_of, out, dweights, dprobs, x.stride(0), *prob_strides, dweight_stride, H, S,
            BLOCK_S=_power(S), BLOCK_H=block_h,
        )  # fmt: skip


def _unpermute_back(
    dy: Tensor, permuted: Tensor | None, probs: Tensor | None, row_of: Tensor, token_of: Tensor
) -> tuple[Tensor, Tensor]:
    dpermuted, dprobs = UNPERMUTE_OPERATOR.gradients(dy, permuted, probs, row_of, token_of)
    if permuted is None or probs is None:
        _spread(dy, None, row_of, token_of, dpermuted, None)
        return dpermuted, dprobs
    (T, S), (R, H) = row_of.shape, dpermuted.shape
    block_h = min(_BLOCK_DOT, _power(H))
    num_tiles = max(1, cdiv(H, block_h))
    parts = dprobs[:, :, None] if num_tiles == 1 else dy.new_empty(T, S, num_tiles, dtype=torch.float32)
    dy, permuted = contiguous_columns(dy), contiguous_columns(permuted)
    if num_programs := T + cdiv(R, _BLOCK_R):
        wrap_triton(_unpermute_back_kernel)[(num_programs, num_tiles)](
            dy, permuted, probs, row_of, token_of, dpermuted, parts, dy.stride(0), permuted.stride(0), *probs.stride(),
            R, H, S=S, BLOCK_H=block_h, BLOCK_R=_BLOCK_R,
            num_warps=max(4, int(block_h // 512)),  # an int also where torch.compile traces symbolic sizes
        )  # fmt: skip
    return dpermuted, dprobs if num_tiles == 1 else parts.sum(dim=-1).to(dprobs.dtype)


def _power(size: int) -> int:
    return int(next_power_of_2(max(1, size)))


permute_op = PERMUTE_OPERATOR.register("permute", _permute, _permute_back)
unpermute_op = UNPERMUTE_OPERATOR.register("unpermute", _unpermute, _unpermute_back)
