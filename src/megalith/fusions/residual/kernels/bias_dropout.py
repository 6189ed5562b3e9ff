"""Triton kernels of fused_bias_dropout.

T tokens (rows), H hidden size (columns). Rows may be strided; columns are contiguous. SKIPPED is the position of
the first feature in its quad of random words: nonzero only for odd shards of features, whose loads are unaligned.
"""

# ruff: noqa: UP044  a starred annotation would iterate over the NamedTuple class, which raises TypeError

from typing import Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalith.fusions.core.dropout_mask import Mask
from megalith.fusions.core.grids import cdiv
from megalith.fusions.core.kernels.philox import dropout_factor
from megalith.fusions.core.registration import wrap_triton
from megalith.fusions.core.rows import contiguous_columns, rows_per_sum
from megalith.fusions.residual.formulas import OPERATOR, Kept
from megalith.numerics.dropout import threshold

__all__ = ["op"]

_BLOCK_H = 1024  # untuned


@triton.jit
def _columns(tile, H, SKIPPED: tl.constexpr, BLOCK_H: tl.constexpr):
    col = tile * BLOCK_H + tl.arange(0, BLOCK_H)
    if SKIPPED > 0:
        col -= SKIPPED
        mask = (col >= 0) & (col < H)
    else:
        mask = col < H
    return col, mask


@triton.jit
def _factor(
    key_ptr, tokens_ptr, row, tile, first_quad, site,
    THRESHOLD: tl.constexpr, SCALE: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    token = row
    if tokens_ptr is not None:
        token = tl.load(tokens_ptr + row)
    quad = first_quad + tile * (BLOCK_H // 4)
    return dropout_factor(tl.load(key_ptr), token, quad, site, THRESHOLD, SCALE, BLOCK_H)


@triton.jit
def _forward_kernel(
    x_ptr, bias_ptr, residual_ptr, y_ptr, key_ptr, tokens_ptr, x_stride, residual_stride, H, first_quad, site,
    THRESHOLD: tl.constexpr, SCALE: tl.constexpr, SKIPPED: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # row * stride passes 2^31 in a large batch
    tile = tl.program_id(1)
    col, mask = _columns(tile, H, SKIPPED, BLOCK_H)
    y = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + row * residual_stride + col, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + col, mask=mask, other=0.0).to(tl.float32)
    if key_ptr is not None:
        y *= _factor(key_ptr, tokens_ptr, row, tile, first_quad, site, THRESHOLD, SCALE, BLOCK_H)
    tl.store(y_ptr + row * H + col, y + residual, mask=mask)


@triton.jit
def _backward_kernel(
    dy_ptr, dx_ptr, dbias_ptr, key_ptr, tokens_ptr, dy_stride, T, H, num_rows, first_quad, site,
    THRESHOLD: tl.constexpr, SCALE: tl.constexpr, SKIPPED: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One block of columns of ``num_rows`` rows: dx of each, and one part of dbias."""
    group, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    col, mask = _columns(tile, H, SKIPPED, BLOCK_H)
    total = tl.zeros([BLOCK_H], dtype=tl.float32)
    for row in range(group * num_rows, tl.minimum(group * num_rows + num_rows, T)):
        row = tl.cast(row, tl.int64)  # the interpreter counts in Python's integers
        dx = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0).to(tl.float32)
        if key_ptr is not None:
            dx *= _factor(key_ptr, tokens_ptr, row, tile, first_quad, site, THRESHOLD, SCALE, BLOCK_H)
        if dx_ptr is not None:
            tl.store(dx_ptr + row * H + col, dx, mask=mask)
        total += dx
    if dbias_ptr is not None:
        tl.store(dbias_ptr + group * H + col, total, mask=mask)


def _forward(x: Tensor, bias: Tensor | None, residual: Tensor, *options: Unpack[Mask]) -> Tensor:
    y, mask = OPERATOR.outputs(x, bias, residual, *options), Mask(*options)
    T, H = x.shape
    if y.numel():
        x, residual = contiguous_columns(x), contiguous_columns(residual)
        bias = None if bias is None else bias.contiguous()
        wrap_triton(_forward_kernel)[(T, _num_tiles(H, mask))](
            x, bias, residual, y, mask.key, _tokens(mask), x.stride(0), residual.stride(0), H,
            mask.feature_offset // 4, mask.site, **_settings(mask),
        )  # fmt: skip
    return y


def _backward(dy: Tensor, *options: Unpack[Kept]) -> tuple[Tensor, Tensor]:
    dx, dbias = OPERATOR.gradients(dy, *options)
    if dy.numel() == 0:
        return dx, dbias.zero_()
    kept, (T, H) = Kept(*options), dy.shape
    mask, needs = kept.mask, kept.needs
    num_tiles = _num_tiles(H, mask)
    num_rows = rows_per_sum(T, num_tiles) if needs[1] else 1
    groups = cdiv(T, num_rows)
    sums = dy.new_empty(groups, H, dtype=torch.float32) if needs[1] else None
    dy = contiguous_columns(dy)
    wrap_triton(_backward_kernel)[(groups, num_tiles)](
        dy, dx if needs[0] else None, sums, mask.key, _tokens(mask), dy.stride(0), T, H, num_rows,
        mask.feature_offset // 4, mask.site, **_settings(mask),
    )  # fmt: skip
    return dx, dbias if sums is None else sums.sum(dim=0).to(dbias.dtype)


def _num_tiles(H: int, mask: Mask) -> int:
    num_tiles: int = cdiv(H + mask.feature_offset % 4, _BLOCK_H)
    return num_tiles


def _tokens(mask: Mask) -> Tensor | None:
    return None if mask.tokens is None else mask.tokens.contiguous()


def _settings(mask: Mask) -> dict[str, int | float]:
    return {
        "THRESHOLD": threshold(mask.p),
        "SCALE": 1.0 / (1.0 - mask.p),
        "SKIPPED": mask.feature_offset % 4,
        "BLOCK_H": _BLOCK_H,
    }


op = OPERATOR.register("bias_dropout_add", _forward, _backward)
