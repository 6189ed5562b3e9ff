"""Triton kernels of masked_softmax.

Rows are (batch, head, query), columns are keys. A row fits in one block of columns, or is processed block by block if
it is wider. LEFT and RIGHT bound a query's window; keys outside it are skipped in steps of 16, so that loads stay wide.
Masks are read by their strides, 0 where they broadcast; MASK_K is the stride of their columns.
"""

# ruff: noqa: UP044  a starred annotation would iterate over the NamedTuple class, which raises TypeError

from typing import Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalith.fusions.core.grids import cdiv
from megalith.fusions.core.kernels.activations import exp
from megalith.fusions.core.registration import wrap_triton
from megalith.fusions.core.rows import contiguous_columns
from megalith.fusions.softmax.formulas import OPERATOR, BackSettings, Settings, sink_gradient, tile

__all__ = ["op"]

_OF_WARP = 512  # 16 numbers per thread
_SECTOR = tl.constexpr(16)  # 16-bit columns in the 32 bytes that a GPU reads at a time


@triton.jit
def _near(row, col, num_rows, Sq, Sk, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Which elements to load: those of the window, and the rest of their sectors."""
    sector = col // _SECTOR * _SECTOR
    own = (row % Sq + (Sk - Sq))[:, None]  # queries and keys end together
    near = (row < num_rows)[:, None] & (col < Sk)[None, :]
    if LEFT >= 0:
        near &= sector[None, :] + (_SECTOR - 1) >= own - LEFT
    if RIGHT >= 0:
        near &= sector[None, :] <= own + RIGHT
    return near


@triton.jit
def _scores(
    x_ptr, mask_ptr, row, col, num_rows, x_stride, mask_b, mask_a, mask_q, A, Sq, Sk,
    MASK_K: tl.constexpr, SCALE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """Scaled scores, -inf where a key is hidden."""
    near = _near(row, col, num_rows, Sq, Sk, LEFT, RIGHT)
    x = tl.load(x_ptr + row.to(tl.int64)[:, None] * x_stride + col[None, :], mask=near, other=0.0).to(tl.float32)
    own = (row % Sq + (Sk - Sq))[:, None]
    visible = near
    if LEFT >= 0:
        visible &= col[None, :] >= own - LEFT
    if RIGHT >= 0:
        visible &= col[None, :] <= own + RIGHT
    if mask_ptr is not None:
        of_row = (row // (Sq * A)).to(tl.int64) * mask_b + (row // Sq % A).to(tl.int64) * mask_a
        of_row += (row % Sq).to(tl.int64) * mask_q
        hidden = tl.load(mask_ptr + of_row[:, None] + col[None, :] * MASK_K, mask=near, other=1)
        visible &= hidden == 0
    return tl.where(visible, x * SCALE, float("-inf"))


@triton.jit
def _top(top, sink_ptr, row, A, Sq):
    """The number to subtract before the exponential, and the sink less it."""
    o = top
    if sink_ptr is not None:
        o = tl.load(sink_ptr + row // Sq % A).to(tl.float32)
        top = tl.where(o > top, o, top)
    top = tl.where(top == float("-inf"), 0.0, top)  # -inf - -inf is NaN; -inf - 0 has the exponential 0
    return top, o - top


@triton.jit
def _forward_kernel(
    x_ptr, mask_ptr, sink_ptr, p_ptr, share_ptr, num_rows, x_stride, mask_b, mask_a, mask_q, A, Sq, Sk,
    MASK_K: tl.constexpr, SCALE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``ROWS`` rows that lie in one block of columns."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK_K)
    s = _scores(
        x_ptr, mask_ptr, row, col, num_rows, x_stride, mask_b, mask_a, mask_q, A, Sq, Sk, MASK_K, SCALE, LEFT, RIGHT
    )  # fmt: skip
    top, o = _top(tl.max(s, axis=1), sink_ptr, row, A, Sq)
    e = exp(s - top[:, None])
    total = tl.sum(e, axis=1)
    if sink_ptr is not None:
        total += exp(o)
        tl.store(share_ptr + row, exp(o) / total, mask=row < num_rows)
    p = e * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]  # a division costs some ten instructions
    at = row.to(tl.int64)[:, None] * Sk + col[None, :]
    tl.store(p_ptr + at, p, mask=(row < num_rows)[:, None] & (col < Sk)[None, :])


@triton.jit
def _wide_forward_kernel(
    x_ptr, mask_ptr, sink_ptr, p_ptr, share_ptr, num_rows, x_stride, mask_b, mask_a, mask_q, A, Sq, Sk,
    MASK_K: tl.constexpr, SCALE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``ROWS`` rows in steps of ``BLOCK_K`` columns: once for largest score and sum, and once for probabilities."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    first, last = _steps(row, Sq, Sk, LEFT, RIGHT, BLOCK_K)
    for start in range(first, last, BLOCK_K):
        col = start + tl.arange(0, BLOCK_K)
        s = _scores(
            x_ptr, mask_ptr, row, col, num_rows, x_stride, mask_b, mask_a, mask_q, A, Sq, Sk, MASK_K, SCALE, LEFT, RIGHT
        )  # fmt: skip
        step_top = tl.max(s, axis=1)
        new_top = tl.where(step_top > top, step_top, top)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * exp(top - base) + tl.sum(exp(s - base[:, None]), axis=1)
        top = new_top
    base, o = _top(top, sink_ptr, row, A, Sq)
    total *= exp(top - base)
    if sink_ptr is not None:
        total += exp(o)
        tl.store(share_ptr + row, exp(o) / total, mask=row < num_rows)
    share = 1.0 / tl.where(total == 0.0, 1.0, total)
    for start in range(0, Sk, BLOCK_K):
        col = start + tl.arange(0, BLOCK_K)
        s = _scores(
            x_ptr, mask_ptr, row, col, num_rows, x_stride, mask_b, mask_a, mask_q, A, Sq, Sk, MASK_K, SCALE, LEFT, RIGHT
        )  # fmt: skip
        p = exp(s - base[:, None]) * share[:, None]
        at = row.to(tl.int64)[:, None] * Sk + col[None, :]
        tl.store(p_ptr + at, p, mask=(row < num_rows)[:, None] & (col < Sk)[None, :])


@triton.jit
def _steps(row, Sq, Sk, LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK_K: tl.constexpr):
    """Where the steps begin that hold the windows of ``row``, and where they end."""
    own = row % Sq + (Sk - Sq)
    first = 0
    last = Sk
    if LEFT >= 0:
        first = tl.maximum(tl.min(own, axis=0) - LEFT, 0) // BLOCK_K * BLOCK_K
    if RIGHT >= 0:
        last = tl.minimum(tl.max(own, axis=0) + RIGHT + 1, Sk)
    return first, last


@triton.jit
def _pair(dp_ptr, p_ptr, row, col, num_rows, dp_stride, Sq, Sk, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    near = _near(row, col, num_rows, Sq, Sk, LEFT, RIGHT)
    dp = tl.load(dp_ptr + row.to(tl.int64)[:, None] * dp_stride + col[None, :], mask=near, other=0.0)
    p = tl.load(p_ptr + row.to(tl.int64)[:, None] * Sk + col[None, :], mask=near, other=0.0)
    return dp.to(tl.float32), p.to(tl.float32), near


@triton.jit
def _backward_kernel(
    dp_ptr, p_ptr, dx_ptr, r_ptr, num_rows, dp_stride, Sq, Sk,
    SCALE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK_K)
    dp, p, near = _pair(dp_ptr, p_ptr, row, col, num_rows, dp_stride, Sq, Sk, LEFT, RIGHT)
    r = tl.sum(dp * p, axis=1)
    if r_ptr is not None:
        tl.store(r_ptr + row, r, mask=row < num_rows)
    dx = tl.where(near, (dp - r[:, None]) * p * SCALE, 0.0)
    at = row.to(tl.int64)[:, None] * Sk + col[None, :]
    tl.store(dx_ptr + at, dx, mask=(row < num_rows)[:, None] & (col < Sk)[None, :])


@triton.jit
def _wide_backward_kernel(
    dp_ptr, p_ptr, dx_ptr, r_ptr, num_rows, dp_stride, Sq, Sk,
    SCALE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    r = tl.zeros([ROWS], tl.float32)
    first, last = _steps(row, Sq, Sk, LEFT, RIGHT, BLOCK_K)
    for start in range(first, last, BLOCK_K):
        col = start + tl.arange(0, BLOCK_K)
        dp, p, _ = _pair(dp_ptr, p_ptr, row, col, num_rows, dp_stride, Sq, Sk, LEFT, RIGHT)
        r += tl.sum(dp * p, axis=1)
    if r_ptr is not None:
        tl.store(r_ptr + row, r, mask=row < num_rows)
    for start in range(0, Sk, BLOCK_K):
        col = start + tl.arange(0, BLOCK_K)
        dp, p, near = _pair(dp_ptr, p_ptr, row, col, num_rows, dp_stride, Sq, Sk, LEFT, RIGHT)
        dx = tl.where(near, (dp - r[:, None]) * p * SCALE, 0.0)
        at = row.to(tl.int64)[:, None] * Sk + col[None, :]
        tl.store(dx_ptr + at, dx, mask=(row < num_rows)[:, None] & (col < Sk)[None, :])


def _forward(x: Tensor, mask: Tensor | None, sink: Tensor | None, *options: Unpack[Settings]) -> tuple[Tensor, Tensor]:
    p, share = OPERATOR.outputs(x, mask, sink, *options)
    settings = Settings(*options)
    T, Sk = x.shape
    if T == 0:
        return p, share
    A, Sq = settings.num_heads, settings.num_queries
    x = contiguous_columns(x)
    strides: tuple[int, ...] = (0, 0, 0, 0)
    if mask is not None:
        mask = contiguous_columns(mask).view(torch.uint8)
        strides = mask.expand(T // (A * Sq), A, Sq, Sk).stride()
    rows, columns = tile(Sk)
    kernel = wrap_triton(_forward_kernel) if columns >= Sk else wrap_triton(_wide_forward_kernel)
    kernel[(cdiv(T, rows),)](
        x, mask, None if sink is None else sink.contiguous(), p, share if sink is not None else None,
        T, x.stride(0), *strides[:3], A, Sq, Sk,
        MASK_K=strides[3], SCALE=settings.scale, LEFT=settings.left, RIGHT=settings.right, ROWS=rows, BLOCK_K=columns,
        num_warps=_num_warps(rows * columns),
    )  # fmt: skip
    return p, share


def _backward(dp: Tensor, p: Tensor, share: Tensor, *options: Unpack[BackSettings]) -> tuple[Tensor, Tensor]:
    dx, dsink = OPERATOR.gradients(dp, p, share, *options)
    settings = BackSettings(*options)
    T, Sk = p.shape
    r = None if settings.sink_dtype is None else share.new_empty(T)
    if T:
        dp = contiguous_columns(dp)
        rows, columns = tile(Sk)
        kernel = wrap_triton(_backward_kernel) if columns >= Sk else wrap_triton(_wide_backward_kernel)
        kernel[(cdiv(T, rows),)](
            dp, p, dx, r, T, dp.stride(0), settings.num_queries, Sk, SCALE=settings.scale, LEFT=settings.left,
            RIGHT=settings.right, ROWS=rows, BLOCK_K=columns, num_warps=_num_warps(rows * columns),
        )  # fmt: skip
    return dx, dsink if r is None else sink_gradient(r, share, settings.forward).to(settings.sink_dtype)


def _num_warps(elements: int) -> int:
    return max(4, min(16, int(elements // _OF_WARP)))  # an int also where torch.compile traces symbolic sizes


op = OPERATOR.register("masked_softmax", _forward, _backward)
