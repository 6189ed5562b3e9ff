"""Triton kernels of fused_rope.

T = S * B tokens, NUM_HEADS heads of D columns. R = 2 * HALF of them, from column OFFSET on, are rotated; the others,
from column REST_START on, are copied. A tile is [BLOCK_T tokens, BLOCK_A heads, columns], so cos and sin are loaded
once for all heads. Tokens and heads may be strided; columns are contiguous.
"""

# ruff: noqa: UP044  a starred annotation would iterate over the NamedTuple class, which raises TypeError

from typing import Any, Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalith.fusions.core.grids import cdiv, next_power_of_2
from megalith.fusions.core.registration import wrap_triton
from megalith.fusions.core.rows import contiguous_columns, rows_per_sum
from megalith.fusions.rope.formulas import OPERATOR, GivenToBackward, Heads, Outputs
from megalith.fusions.rope.rotation import Rotation, Tables, reads_pairs

__all__ = ["load_parts", "load_tables", "op", "rotate", "store_parts", "table_arguments"]

_TILE, _WARPS = 2048, 4  # elements per tile, untuned


@triton.jit
def load_parts(start, rows, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, PAIRS: tl.constexpr):
    """The two features of each pair, in float32, of rows that begin at ``start`` [tokens, heads, 1]."""
    if PAIRS:  # neighbours: one wide load, taken apart in registers
        col = tl.arange(0, 2 * BLOCK_HALF)[None, None, :]
        both = tl.load(start + col, mask=rows & (col < 2 * HALF), other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, [both.shape[0], both.shape[1], BLOCK_HALF, 2]))
    else:
        col = tl.arange(0, BLOCK_HALF)[None, None, :]
        mask = rows & (col < HALF)
        first = tl.load(start + col, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(start + HALF + col, mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def store_parts(start, first, second, rows, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, PAIRS: tl.constexpr):
    """Stores what ``load_parts`` would load."""
    if PAIRS:
        col = tl.arange(0, 2 * BLOCK_HALF)[None, None, :]
        both = tl.reshape(tl.join(first, second), [first.shape[0], first.shape[1], 2 * BLOCK_HALF])
        tl.store(start + col, both, mask=rows & (col < 2 * HALF))
    else:
        col = tl.arange(0, BLOCK_HALF)[None, None, :]
        mask = rows & (col < HALF)
        tl.store(start + col, first, mask=mask)
        tl.store(start + HALF + col, second, mask=mask)


@triton.jit
def load_tables(
    cos_ptr, sin_ptr, positions_ptr, s, b, in_range, table_stride_s, table_stride_b, num_rows,
    position_stride_s, position_stride_b, position_stride_p,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, TIMES: tl.constexpr, HEIGHTS: tl.constexpr,
):  # fmt: skip
    """cos and sin [tokens, 1, pairs] of the tokens (s, b), in float32; NaN where the table has no such row."""
    col = tl.arange(0, BLOCK_HALF)[None, None, :]
    row = s
    if positions_ptr is not None:
        at = positions_ptr + s * position_stride_s + b * position_stride_b
        if TIMES is not None:  # mRoPE: pairs follow the time, the height or the width of a token
            at += ((col >= TIMES).to(tl.int32) + (col >= TIMES + HEIGHTS).to(tl.int32)) * position_stride_p
        row = tl.load(at, mask=in_range, other=0).to(tl.int64)
    known = (row >= 0) & (row < num_rows)
    mask = in_range & known & (col < HALF)
    at = row * table_stride_s + b * table_stride_b + col
    cos = tl.load(cos_ptr + at, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return tl.where(known, cos, float("nan")), tl.where(known, sin, float("nan"))


@triton.jit
def rotate(first, second, cos, sin, INVERSE: tl.constexpr):
    """Each pair, rotated; or rotated back."""
    if INVERSE:
        sin = -sin
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _load_gain(
    w_ptr, D: tl.constexpr, HALF: tl.constexpr, OFFSET: tl.constexpr, PAIRS: tl.constexpr, PLUS: tl.constexpr
):  # fmt: skip
    """The gains [1, 1, columns] of rotated columns and of the rest; without a weight ones, which compile to nothing."""
    REST: tl.constexpr = D - 2 * HALF
    REST_START: tl.constexpr = 0 if OFFSET else 2 * HALF
    BLOCK_HALF: tl.constexpr = triton.next_power_of_2(HALF)
    BLOCK_REST: tl.constexpr = triton.next_power_of_2(REST)
    first, second, rest = 1.0, 1.0, 1.0
    if w_ptr is not None:
        start = w_ptr + tl.zeros([1, 1, 1], dtype=tl.int32)
        first, second = load_parts(start + OFFSET, tl.full([1, 1, 1], 1, dtype=tl.int1), HALF, BLOCK_HALF, PAIRS)
        first, second = first + PLUS, second + PLUS
        if REST > 0:
            col = tl.arange(0, BLOCK_REST)[None, None, :]
            rest = tl.load(w_ptr + REST_START + col, mask=col < REST, other=0.0).to(tl.float32) + PLUS
    return first, second, rest


@triton.jit
def _store_sums(
    sums_ptr, first, second, rest, D: tl.constexpr, HALF: tl.constexpr, OFFSET: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    """Stores the sums of [tokens, heads, columns] where ``_load_gain`` would load them."""
    REST: tl.constexpr = D - 2 * HALF
    REST_START: tl.constexpr = 0 if OFFSET else 2 * HALF
    first = tl.sum(tl.sum(first, axis=1, keep_dims=True), axis=0, keep_dims=True)
    second = tl.sum(tl.sum(second, axis=1, keep_dims=True), axis=0, keep_dims=True)
    sums = sums_ptr + tl.zeros([1, 1, 1], dtype=tl.int64)
    everywhere = tl.full([1, 1, 1], 1, dtype=tl.int1)
    store_parts(sums + OFFSET, first, second, everywhere, HALF, triton.next_power_of_2(HALF), PAIRS)
    if REST > 0:
        rest = tl.sum(tl.sum(rest, axis=1, keep_dims=True), axis=0, keep_dims=True)
        col = REST_START + tl.arange(0, triton.next_power_of_2(REST))[None, None, :]
        tl.store(sums + col, rest, mask=col < REST_START + REST)


@triton.jit
def _rotate_heads(
    x_ptr, stride_a, y_ptr, gain, rstd_ptr, token, in_range, angles,
    NUM_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, OFFSET: tl.constexpr,
    READ: tl.constexpr, WRITE: tl.constexpr, EPS: tl.constexpr, BLOCK_A: tl.constexpr,
):  # fmt: skip
    """Normalises (if there is ``rstd_ptr``) and rotates all heads of the tokens, which begin at ``x_ptr`` [tokens].

    ``gain`` is that of ``_load_gain``, ``angles`` are (cos, sin) of ``load_tables``.
    """
    REST: tl.constexpr = D - 2 * HALF
    REST_START: tl.constexpr = 0 if OFFSET else 2 * HALF
    BLOCK_HALF: tl.constexpr = triton.next_power_of_2(HALF)
    BLOCK_REST: tl.constexpr = triton.next_power_of_2(REST)
    w_first, w_second, w_rest = gain
    cos, sin = angles
    for start in range(0, NUM_HEADS, BLOCK_A):
        head = (start + tl.arange(0, BLOCK_A)).to(tl.int64)[None, :, None]
        rows = in_range & (head < NUM_HEADS)
        x = x_ptr + head * stride_a
        y = token * NUM_HEADS + head
        first, second = load_parts(x + OFFSET, rows, HALF, BLOCK_HALF, READ)
        if REST > 0:
            col = REST_START + tl.arange(0, BLOCK_REST)[None, None, :]
            rest_mask = rows & (col < REST_START + REST)
            rest = tl.load(x + col, mask=rest_mask, other=0.0)
        if rstd_ptr is not None:
            squares = tl.sum(first * first + second * second, axis=2, keep_dims=True)
            if REST > 0:
                rest = rest.to(tl.float32)
                squares += tl.sum(rest * rest, axis=2, keep_dims=True)
            rstd = tl.rsqrt(squares / D + EPS)
            tl.store(rstd_ptr + y, rstd, mask=rows)
            first, second = first * rstd * w_first, second * rstd * w_second
            if REST > 0:
                rest = rest * rstd * w_rest
        first, second = rotate(first, second, cos, sin, False)
        store_parts(y_ptr + y * D + OFFSET, first, second, rows, HALF, BLOCK_HALF, WRITE)
        if REST > 0:
            tl.store(y_ptr + y * D + col, rest, mask=rest_mask)


@triton.jit
def _rotate_kernel(
    q_ptr, k_ptr, y_ptr, y_k_ptr, q_weight_ptr, k_weight_ptr, q_rstd_ptr, k_rstd_ptr, cos_ptr, sin_ptr, positions_ptr,
    table_stride_s, table_stride_b, num_rows, position_stride_s, position_stride_b, position_stride_p,
    q_stride_s, q_stride_b, q_stride_a, k_stride_s, k_stride_b, k_stride_a, T, B,
    A: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, OFFSET: tl.constexpr,
    READ: tl.constexpr, WRITE: tl.constexpr, INVERSE: tl.constexpr, TIMES: tl.constexpr, HEIGHTS: tl.constexpr,
    EPS: tl.constexpr, PLUS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    BLOCK_HALF: tl.constexpr = triton.next_power_of_2(HALF)
    token = (tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None, None]
    s, b, in_range = token // B, token % B, token < T
    cos, sin = load_tables(
        cos_ptr, sin_ptr, positions_ptr, s, b, in_range, table_stride_s, table_stride_b, num_rows,
        position_stride_s, position_stride_b, position_stride_p, HALF, BLOCK_HALF, TIMES, HEIGHTS,
    )  # fmt: skip
    angles = (cos, -sin) if INVERSE else (cos, sin)
    _rotate_heads(
        q_ptr + s * q_stride_s + b * q_stride_b, q_stride_a, y_ptr,
        _load_gain(q_weight_ptr, D, HALF, OFFSET, READ, PLUS), None if q_weight_ptr is None else q_rstd_ptr,
        token, in_range, angles, A, D, HALF, OFFSET, READ, WRITE, EPS, BLOCK_A,
    )  # fmt: skip
    if k_ptr is not None:
        _rotate_heads(
            k_ptr + s * k_stride_s + b * k_stride_b, k_stride_a, y_k_ptr,
            _load_gain(k_weight_ptr, D, HALF, OFFSET, READ, PLUS), None if k_weight_ptr is None else k_rstd_ptr,
            token, in_range, angles, G, D, HALF, OFFSET, READ, WRITE, EPS, BLOCK_G,
        )  # fmt: skip


@triton.jit
def _norm_back_kernel(
    dy_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, sums_ptr, cos_ptr, sin_ptr, positions_ptr,
    table_stride_s, table_stride_b, num_rows, position_stride_s, position_stride_b, position_stride_p,
    dy_stride_s, dy_stride_b, dy_stride_a, x_stride_s, x_stride_b, x_stride_a, T, B, num_steps,
    A: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, OFFSET: tl.constexpr,
    READ: tl.constexpr, WRITE: tl.constexpr, TIMES: tl.constexpr, HEIGHTS: tl.constexpr, PLUS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_A: tl.constexpr,
):  # fmt: skip
    """dx of ``num_steps`` blocks of tokens, all heads of each, and one part of the gain's gradient.

    dy is read as forward writes, and dx is written as forward reads: READ and WRITE are of the rotation back.
    """
    REST: tl.constexpr = D - 2 * HALF
    REST_START: tl.constexpr = 0 if OFFSET else 2 * HALF
    BLOCK_HALF: tl.constexpr = triton.next_power_of_2(HALF)
    BLOCK_REST: tl.constexpr = triton.next_power_of_2(REST)
    group = tl.program_id(0).to(tl.int64)
    w_first, w_second, w_rest = _load_gain(w_ptr, D, HALF, OFFSET, WRITE, PLUS)
    sum_first = tl.zeros([BLOCK_T, BLOCK_A, BLOCK_HALF], dtype=tl.float32)
    sum_second = tl.zeros([BLOCK_T, BLOCK_A, BLOCK_HALF], dtype=tl.float32)
    sum_rest = tl.zeros([BLOCK_T, BLOCK_A, BLOCK_REST if REST > 0 else 1], dtype=tl.float32)
    for step in range(num_steps):
        token = ((group * num_steps + step) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None, None]
        s, b, in_range = token // B, token % B, token < T
        cos, sin = load_tables(
            cos_ptr, sin_ptr, positions_ptr, s, b, in_range, table_stride_s, table_stride_b, num_rows,
            position_stride_s, position_stride_b, position_stride_p, HALF, BLOCK_HALF, TIMES, HEIGHTS,
        )  # fmt: skip
        for start in range(0, A, BLOCK_A):
            head = (start + tl.arange(0, BLOCK_A)).to(tl.int64)[None, :, None]
            rows = in_range & (head < A)
            dy = dy_ptr + s * dy_stride_s + b * dy_stride_b + head * dy_stride_a
            x = x_ptr + s * x_stride_s + b * x_stride_b + head * x_stride_a
            at = token * A + head
            rstd = tl.load(rstd_ptr + at, mask=rows, other=0.0)
            g_first, g_second = load_parts(dy + OFFSET, rows, HALF, BLOCK_HALF, READ)
            g_first, g_second = rotate(g_first, g_second, cos, sin, True)
            first, second = load_parts(x + OFFSET, rows, HALF, BLOCK_HALF, WRITE)
            first, second = first * rstd, second * rstd
            # a row that is not there may meet a table's NaN
            sum_first += tl.where(rows, g_first * first, 0.0)
            sum_second += tl.where(rows, g_second * second, 0.0)
            g_first, g_second = g_first * w_first, g_second * w_second
            mean = tl.sum(g_first * first + g_second * second, axis=2, keep_dims=True)
            if REST > 0:
                col = REST_START + tl.arange(0, BLOCK_REST)[None, None, :]
                rest_mask = rows & (col < REST_START + REST)
                g_rest = tl.load(dy + col, mask=rest_mask, other=0.0).to(tl.float32)
                rest = tl.load(x + col, mask=rest_mask, other=0.0).to(tl.float32) * rstd
                sum_rest += g_rest * rest
                g_rest *= w_rest
                mean += tl.sum(g_rest * rest, axis=2, keep_dims=True)
            mean = mean / D
            first, second = rstd * (g_first - first * mean), rstd * (g_second - second * mean)
            store_parts(dx_ptr + at * D + OFFSET, first, second, rows, HALF, BLOCK_HALF, WRITE)
            if REST > 0:
                tl.store(dx_ptr + at * D + col, rstd * (g_rest - rest * mean), mask=rest_mask)
    _store_sums(sums_ptr + group * D, sum_first, sum_second, sum_rest, D, HALF, OFFSET, WRITE)


def _forward(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    *options: Unpack[Rotation],
) -> Outputs:
    results = OPERATOR.outputs(q, k, cos, sin, positions, q_norm_weight, k_norm_weight, *options)
    _rotate(q, k, Tables(cos, sin, positions), q_norm_weight, k_norm_weight, Rotation(*options), results)
    return results


def _backward(*inputs: Unpack[GivenToBackward]) -> Outputs:
    of_q, of_k, table, back = GivenToBackward(*inputs).parts()
    dq, dk, dq_weight, dk_weight = results = OPERATOR.gradients(*inputs)
    if of_q.x is None and of_k.x is None:
        _rotate(of_q.dy, None if of_k.dy.dim() == 1 else of_k.dy, table, None, None, back, results)
        return results
    for heads, dx, dweight in ((of_q, dq, dq_weight), (of_k, dk, dk_weight)):
        if heads.weight is not None:
            _norm_back(heads, table, back, dx, dweight)
        elif heads.dy.dim() > 1:  # one of the two is not normalized
            _rotate(heads.dy, None, table, None, None, back, (dx, *results[1:]))
    return results


def _rotate(
    q: Tensor,
    k: Tensor | None,
    table: Tables,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    how: Rotation,
    results: tuple[Tensor, ...],
) -> None:
    S, B, A, D = q.shape
    if S * B == 0:
        return
    G = 0 if k is None else k.shape[2]
    sizes = _sizes(D, table, how)
    BLOCK_T, BLOCK_A = _tile(max(A, G), sizes)
    q, k = contiguous_columns(q), None if k is None else contiguous_columns(k)
    weights = (None if w is None else w.contiguous() for w in (q_norm_weight, k_norm_weight))
    y, y_k, q_rstd, k_rstd = results
    wrap_triton(_rotate_kernel)[(cdiv(S * B, BLOCK_T),)](
        q, k, y, None if k is None else y_k, *weights, q_rstd, k_rstd, *table_arguments(table),
        *q.stride()[:3], *((0, 0, 0) if k is None else k.stride()[:3]), S * B, B,
        A=A, G=G, INVERSE=how.inverse, EPS=how.eps, BLOCK_T=BLOCK_T, BLOCK_A=min(BLOCK_A, _tile(A, sizes)[1]),
        BLOCK_G=min(BLOCK_A, _tile(G, sizes)[1]), num_warps=_WARPS, **sizes,
    )  # fmt: skip


def _norm_back(heads: Heads, table: Tables, back: Rotation, dx: Tensor, dweight: Tensor) -> None:
    dy, x, weight, rstd = heads
    assert x is not None, "normalized heads are saved"
    assert weight is not None, "called for normalized heads only"
    S, B, A, D = x.shape
    if x.numel() == 0:
        dweight.zero_()
        return
    sizes = _sizes(D, table, back)
    BLOCK_T, BLOCK_A = _tile(A, sizes)
    num_steps = cdiv(rows_per_sum(S * B, 1), BLOCK_T)
    groups = cdiv(S * B, num_steps * BLOCK_T)
    sums = x.new_empty(groups, D, dtype=torch.float32)
    dy, x = contiguous_columns(dy), contiguous_columns(x)
    wrap_triton(_norm_back_kernel)[(groups,)](
        dy, x, weight.contiguous(), rstd, dx, sums, *table_arguments(table), *dy.stride()[:3], *x.stride()[:3],
        S * B, B, num_steps, A=A, BLOCK_T=BLOCK_T, BLOCK_A=BLOCK_A, num_warps=_WARPS, **sizes,
    )  # fmt: skip
    dweight.copy_(sums.sum(dim=0))


def table_arguments(table: Tables) -> tuple[Tensor | int | None, ...]:
    """The kernel arguments for the tables: pointers, strides and the number of rows."""
    cos, sin, positions = contiguous_columns(table.cos), contiguous_columns(table.sin), table.positions
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    strides = (0, 0, 0) if positions is None else (positions.stride(0), _batch_stride(positions), positions.stride(2))
    return cos, sin, positions, cos.stride(0), _batch_stride(cos), len(cos), *strides


def _batch_stride(x: Tensor) -> int:
    return x.stride(1) if x.shape[1] > 1 else 0


def _sizes(D: int, table: Tables, how: Rotation) -> dict[str, Any]:
    """Compile-time constants of both kernels that concern columns."""
    HALF = table.cos.shape[-1]
    TIMES, HEIGHTS, _ = how.sections or (None, None, None)
    return {
        "D": D,
        "HALF": HALF,
        "OFFSET": how.offset,
        "READ": reads_pairs(how.layout, how.inverse),
        "WRITE": reads_pairs(how.layout, not how.inverse),
        "TIMES": TIMES,
        "HEIGHTS": HEIGHTS,
        "PLUS": 1.0 if how.zero_centered else 0.0,
    }


def _tile(num_heads: int, sizes: dict[str, Any]) -> tuple[int, int]:
    """Tokens and heads per tile: as many heads as fit, and more tokens if there are few heads."""
    D, HALF = sizes["D"], sizes["HALF"]
    rest = next_power_of_2(D - 2 * HALF) if D > 2 * HALF else 0
    width = next_power_of_2(2 * next_power_of_2(HALF) + rest)
    BLOCK_A = max(1, min(next_power_of_2(num_heads), _TILE // width))
    return max(1, _TILE // (BLOCK_A * width)), BLOCK_A


op = OPERATOR.register("rope", _forward, _backward)
