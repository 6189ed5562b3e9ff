"""Triton kernels of cross entropy: statistics of this rank's columns, loss from those of all ranks, gradient.

The letters are those of ``cross_entropy.formulas``: for a row, m and d are the shift and the sum of the exponentials of
all vocabulary entries except the target, x_y is the target's logit, s the scaled sum of the logits. T tokens (rows),
n columns without padding. Rows may be strided; columns are contiguous. If the vocabulary is padded, num_read columns
are loaded, including some of the padding, which is masked out after the load.
"""

# ruff: noqa: UP044  a starred annotation would iterate over the NamedTuple class, which raises TypeError

import math
from typing import Unpack

import triton
import triton.language as tl
from torch import Tensor

from megalith.fusions.core.grids import cdiv
from megalith.fusions.core.kernels.activations import exp, log1p, tanh_and_slope
from megalith.fusions.core.registration import register_without_gradient, wrap_triton
from megalith.fusions.core.rows import contiguous_columns
from megalith.fusions.cross_entropy.formulas import OPERATOR, SUM_SCALE, num_true_columns, statistics_outputs
from megalith.fusions.cross_entropy.options import Part, PartAndSum, PartAndTerms, part_and_terms
from megalith.fusions.cross_entropy.steps import steps_of_operators

__all__ = ["STEPS", "gradient_into", "loss", "statistics"]

_BLOCK_V, _WARPS = 2048, 8  # columns per step of the statistics
_TILE_V, _TILE_WARPS = 4096, 8  # columns per step of the gradient
_GRADIENT_PROGRAMS = 16896  # fewer rows are split into this many programs: 128 per multiprocessor of an H100
_BLOCK_T = 128  # untuned: rows per program of the loss
_PROGRAMS = 528  # fewer rows are split into this many programs: four per multiprocessor of an H100
_WORD_BYTES = 16  # bytes that one thread loads at once

_SUM_SCALE = tl.constexpr(SUM_SCALE)


@triton.jit
def _capped(x, SOFTCAP: tl.constexpr):
    if SOFTCAP is not None:
        tanh, _ = tanh_and_slope(x / SOFTCAP)
        x = tanh * SOFTCAP
    return x


@triton.jit
def _at_most(x, bound):
    """x, or ``bound`` for the target's logit, which m does not bound; NaN stays NaN."""
    return tl.minimum(x, bound, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _column(target, start, n):
    """The target's column among ``n`` in 32 bits, for cheap comparisons; -1 where it is elsewhere."""
    column = target - start
    return tl.where((column >= 0) & (column < n), column, -1).to(tl.int32)


@triton.jit
def _merged(stats_ptr, row, mask, T, num_parts, K: tl.constexpr):
    """m, d, x_y and s of rows, from those of ``num_parts`` parts of the vocabulary [R, T, K]."""
    m = tl.full(row.shape, float("-inf"), dtype=tl.float32)
    d = tl.zeros(row.shape, dtype=tl.float32)
    x_y = tl.zeros(row.shape, dtype=tl.float32)
    s = tl.zeros(row.shape, dtype=tl.float32)
    for part in range(num_parts):
        at = stats_ptr + (part * T + row) * K
        m_part = tl.load(at, mask=mask, other=float("-inf"))
        top = tl.maximum(m, m_part)
        shift = tl.where(top == float("-inf"), 0.0, top)  # -inf - -inf is NaN
        d = d * tl.exp(m - shift) + tl.load(at + 1, mask=mask, other=0.0) * tl.exp(m_part - shift)
        m = top
        x_y += tl.load(at + 2, mask=mask, other=0.0)
        if K == 4:
            s += tl.load(at + 3, mask=mask, other=0.0)
    return m, d, x_y, s


@triton.jit
def _statistics_kernel(
    logits_ptr, target_ptr, stats_ptr, stride, T, n, num_read, span, start,
    IGNORE: tl.constexpr, SOFTCAP: tl.constexpr, K: tl.constexpr, WORD: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One row of ``span`` columns, read once: a running maximum and sum in each lane of WORD columns."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)  # row * stride passes 2^31 in a large batch
    target = tl.load(target_ptr + row)
    column = _column(target, start, n)
    first = split * span
    end = tl.minimum(first + span, n if num_read is None else num_read)
    end = tl.where(target == IGNORE, first, end)  # nothing is read for what does not count
    tile = tl.arange(0, BLOCK_V // WORD)[:, None] * WORD + tl.arange(0, WORD)[None, :]
    m = tl.full([BLOCK_V // WORD], float("-inf"), dtype=tl.float32)
    d = tl.zeros([BLOCK_V // WORD], dtype=tl.float32)
    s = tl.zeros([BLOCK_V // WORD], dtype=tl.float32)
    for begin in range(first, end, BLOCK_V):
        col = begin + tile
        mask = col < end
        x = tl.load(logits_ptr + row * stride + col, mask=mask, other=float("-inf")).to(tl.float32)
        if num_read is not None:
            mask = col < tl.minimum(end, n)
            x = tl.where(mask, x, float("-inf"))
        if SOFTCAP is not None:
            x = tl.where(mask, _capped(x, SOFTCAP), float("-inf"))
        if K == 4:
            s += tl.sum(tl.where(mask, x * _SUM_SCALE, 0.0), axis=1)
        x = tl.where(col == column, float("-inf"), x)
        top = tl.maximum(m, tl.max(x, axis=1))  # drops NaN, which passes through the sum
        shift = tl.where(top == float("-inf"), 0.0, top)
        d = d * tl.exp(m - shift) + tl.sum(exp(x - shift[:, None]), axis=1)
        m = top
    top = tl.max(m, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    here = (column >= first) & (column < end)
    x_y = tl.load(logits_ptr + row * stride + column, mask=here, other=0.0).to(tl.float32)
    at = stats_ptr + (split * T + row) * K
    tl.store(at, top)
    tl.store(at + 1, tl.sum(d * tl.exp(m - shift), axis=0))
    tl.store(at + 2, _capped(x_y, SOFTCAP))
    if K == 4:
        tl.store(at + 3, tl.sum(s, axis=0))


@triton.jit
def _merge_kernel(parts_ptr, stats_ptr, T, num_parts, K: tl.constexpr, BLOCK_T: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask = row < T
    m, d, x_y, s = _merged(parts_ptr, row, mask, T, num_parts, K)
    tl.store(stats_ptr + row * K, m, mask=mask)
    tl.store(stats_ptr + row * K + 1, d, mask=mask)
    tl.store(stats_ptr + row * K + 2, x_y, mask=mask)
    if K == 4:
        tl.store(stats_ptr + row * K + 3, s, mask=mask)


@triton.jit
def _loss_kernel(
    parts_ptr, target_ptr, loss_ptr, whole_ptr, T, num_parts, vocab_size,
    IGNORE: tl.constexpr, SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, K: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask = row < T
    target = tl.load(target_ptr + row, mask=mask, other=0)
    m, d, x_y, s = _merged(parts_ptr, row, mask, T, num_parts, K)
    outside = (target < 0) | (target >= vocab_size) | (x_y == float("inf"))  # an infinite logit is NaN to softmax
    x_y = tl.where(outside & (target != IGNORE), float("nan"), x_y)
    t = m - x_y
    near, far = tl.exp(tl.where(t > 0.0, 0.0, t)), tl.exp(tl.where(t > 0.0, -t, 0.0))
    log_sum = tl.where(t > 0.0, tl.log(d + far), log1p(d * near))
    ce = tl.where(t > 0.0, t, 0.0) + log_sum
    lse = tl.where(t > 0.0, m, x_y) + log_sum
    loss = ce
    if K == 4:
        loss = (1.0 - SMOOTHING) * ce + SMOOTHING * (lse - s / (vocab_size * _SUM_SCALE))
    if Z_LOSS != 0.0:
        loss += Z_LOSS * lse * lse
    tl.store(loss_ptr + row, tl.where(target == IGNORE, 0.0, loss), mask=mask)
    tl.store(whole_ptr + row * 3, m, mask=mask)
    tl.store(whole_ptr + row * 3 + 1, d, mask=mask)
    tl.store(whole_ptr + row * 3 + 2, x_y, mask=mask)


@triton.jit
def _gradient_kernel(
    dloss_ptr, logits_ptr, target_ptr, whole_ptr, dlogits_ptr, stride, n, num_read, num_columns, start,
    IGNORE: tl.constexpr, SOFTCAP: tl.constexpr, SMOOTHING: tl.constexpr, UNIFORM: tl.constexpr, Z_LOSS: tl.constexpr,
    TILE_V: tl.constexpr,
):  # fmt: skip
    """A part of a row, whose numbers are loaded once; the target's entry is overwritten last.

    ``num_read`` is None where there is no padding. ``UNIFORM`` is ``SMOOTHING`` over the size of the vocabulary.
    """
    row = tl.program_id(0).to(tl.int64)
    span = tl.cdiv(tl.cdiv(num_columns, TILE_V), tl.num_programs(1)) * TILE_V
    first = tl.program_id(1) * span
    end = tl.minimum(first + span, num_columns)
    target = tl.load(target_ptr + row)
    counts = target != IGNORE
    column = _column(target, start, n)
    here = counts & (column >= first) & (column < end)
    g = tl.load(dloss_ptr + row).to(tl.float32)
    m = tl.load(whole_ptr + row * 3)
    d = tl.load(whole_ptr + row * 3 + 1)
    x_y = tl.load(whole_ptr + row * 3 + 2)
    t = m - x_y
    near, far = tl.exp(tl.where(t > 0.0, 0.0, t)), tl.exp(tl.where(t > 0.0, -t, 0.0))
    total = d * near + far
    at_target = -(1.0 - SMOOTHING) * d * (near / total)
    scale = near / total
    if SMOOTHING != 0.0 or Z_LOSS != 0.0:
        slope_of_lse = 2.0 * Z_LOSS * (tl.where(t > 0.0, m, x_y) + tl.log(total))
        at_target += (far / total) * (SMOOTHING + slope_of_lse) - UNIFORM
        scale *= 1.0 + slope_of_lse
    if SOFTCAP is not None:
        raw = tl.load(logits_ptr + row * stride + column, mask=here, other=0.0).to(tl.float32)
        tl.debug_barrier()  # dlogits may be logits: no thread may store before all have read
        _, slope_at_target = tanh_and_slope(raw / SOFTCAP)
        at_target *= slope_at_target
    scale = tl.where(counts, scale * g, 0.0)
    uniform = tl.where(counts, UNIFORM * g, 0.0) if SMOOTHING != 0.0 else 0.0
    shift = tl.where(counts & (m != float("-inf")), m, 0.0)
    for begin in range(first, end, TILE_V):
        col = begin + tl.arange(0, TILE_V)
        mask = (col < (n if num_read is None else num_read)) & counts
        x = tl.load(logits_ptr + row * stride + col, mask=mask, other=float("-inf")).to(tl.float32)
        if SOFTCAP is None:
            dx = exp(_at_most(x, shift) - shift) * scale - uniform
        else:
            tanh, slope = tanh_and_slope(x / SOFTCAP)
            dx = (exp(_at_most(tanh * SOFTCAP, shift) - shift) * scale - uniform) * slope
        if num_read is not None:
            dx = tl.where(col < n, dx, 0.0)
        tl.store(dlogits_ptr + row * num_columns + col, dx, mask=col < num_columns)
    tl.debug_barrier()  # another thread has stored that entry
    tl.store(dlogits_ptr + row * num_columns + column, at_target * g, mask=here)


def statistics(logits: Tensor, target: Tensor, *options: Unpack[PartAndSum]) -> Tensor:
    found = statistics_outputs(logits, target, *options)
    part = Part(*options[:4])
    T, K = found.shape
    if T == 0:
        return found
    logits = contiguous_columns(logits)
    n = num_true_columns(logits.shape[1], part)
    num_splits = max(1, min(cdiv(_PROGRAMS, T), n // _BLOCK_V))
    span = cdiv(cdiv(n, num_splits), _BLOCK_V) * _BLOCK_V
    parts = found if num_splits == 1 else found.new_empty(num_splits, T, K)
    wrap_triton(_statistics_kernel)[(T, num_splits)](
        logits, target.contiguous(), parts, logits.stride(0), T, n, _num_read(n, logits), span, part.start,
        IGNORE=part.ignore_index, SOFTCAP=_cap(part), K=K,
        WORD=_WORD_BYTES // logits.element_size(), BLOCK_V=_BLOCK_V, num_warps=_WARPS,
    )  # fmt: skip
    if num_splits > 1:
        wrap_triton(_merge_kernel)[(cdiv(T, _BLOCK_T),)](parts, found, T, num_splits, K=K, BLOCK_T=_BLOCK_T)
    return found


def loss(logits: Tensor, target: Tensor, parts: Tensor, *options: Unpack[PartAndTerms]) -> tuple[Tensor, Tensor]:
    losses, whole = OPERATOR.outputs(logits, target, parts, *options)
    part, terms = part_and_terms(*options)
    num_parts, T, K = parts.shape
    if T:
        wrap_triton(_loss_kernel)[(cdiv(T, _BLOCK_T),)](
            parts.contiguous(), target.contiguous(), losses, whole, T, num_parts, part.vocab_size,
            IGNORE=part.ignore_index, SMOOTHING=terms.smoothing, Z_LOSS=terms.z_loss, K=K, BLOCK_T=_BLOCK_T,
        )  # fmt: skip
    return losses, whole


def gradient_into(
    dlogits: Tensor, dloss: Tensor, logits: Tensor, target: Tensor, whole: Tensor, *options: Unpack[PartAndTerms]
) -> None:
    """Fills ``dlogits``, which may be ``logits`` itself: each entry is written by the only program that reads it."""
    part, terms = part_and_terms(*options)
    assert dlogits.is_contiguous(), "dlogits must be contiguous: fresh memory, or the result of a matmul"
    T, num_columns = dlogits.shape
    if dlogits.numel() == 0:
        return
    logits = contiguous_columns(logits)
    n = num_true_columns(num_columns, part)
    num_splits = max(1, min(cdiv(_GRADIENT_PROGRAMS, T), cdiv(num_columns, _TILE_V)))
    num_read = _num_read(n, logits) or (n if n < num_columns else None)
    wrap_triton(_gradient_kernel)[(T, num_splits)](
        dloss.contiguous(), logits, target.contiguous(), whole, dlogits, logits.stride(0),
        n, num_read, num_columns, part.start,
        IGNORE=part.ignore_index, SOFTCAP=_cap(part), SMOOTHING=terms.smoothing,
        UNIFORM=terms.smoothing / part.vocab_size, Z_LOSS=terms.z_loss, TILE_V=_TILE_V, num_warps=_TILE_WARPS,
    )  # fmt: skip


def _gradient(
    dloss: Tensor, logits: Tensor, target: Tensor, whole: Tensor, *options: Unpack[PartAndTerms]
) -> tuple[Tensor]:
    (dlogits,) = OPERATOR.gradients(dloss, logits, target, whole, *options)
    gradient_into(dlogits, dloss, logits, target, whole, *options)
    return (dlogits,)


def _num_read(n: int, logits: Tensor) -> int | None:
    """``n`` rounded up to a multiple of 16 if a row of ``logits`` has that many columns; None to read ``n``.

    The mask of a load limits its width: a mask that can end at any column makes every load one element wide.
    """
    rounded: int = cdiv(n, 16) * 16
    return rounded if n < rounded <= logits.shape[1] else None


def _cap(part: Part) -> float | None:
    return None if part.softcap == math.inf else part.softcap


STEPS = steps_of_operators(
    register_without_gradient("cross_entropy_statistics", statistics, statistics_outputs),
    OPERATOR.register("cross_entropy", loss, _gradient),
)
