"""Triton kernels of fused_topk_router and of the scores for its auxiliary loss.

T tokens (rows), E experts (columns), K chosen experts. A program holds whole rows of a few tokens. Rows may be strided.
"""

# ruff: noqa: UP044  a starred annotation would iterate over the NamedTuple class, which raises TypeError

from typing import Unpack

import triton
import triton.language as tl
from torch import Tensor

from megalith.fusions.core.grids import cdiv, next_power_of_2
from megalith.fusions.core.kernels.activations import log1p, sigmoid
from megalith.fusions.core.registration import wrap_triton
from megalith.fusions.core.rows import contiguous_columns
from megalith.fusions.routing.scores import EPSILON, FAR
from megalith.fusions.routing.topk_router_formulas import OPERATOR, Choice

__all__ = ["TAKEN", "key_of", "op", "score", "slope", "softmax_of_rows", "take", "tile"]

_BLOCK = 1024  # untuned: entries per tile of several tokens
_EPSILON, _FAR = tl.constexpr(EPSILON), tl.constexpr(FAR)
TAKEN = tl.constexpr(-(2**31))  # below the key of every number
_GREATEST = tl.constexpr(2**31 - 1)


def tile(num_experts: int) -> dict[str, int]:
    """Tokens and columns per tile, and its number of warps."""
    block_e = next_power_of_2(num_experts)
    return {"BLOCK_T": max(1, _BLOCK // block_e), "BLOCK_E": block_e, "num_warps": min(32, max(4, block_e // 256))}


@triton.jit
def score(x, KIND: tl.constexpr):
    """The score of each logit by itself: sigmoid or sqrtsoftplus."""
    if KIND == "sigmoid":
        q = sigmoid(x)
    else:
        softplus = tl.where(x < 0.0, 0.0, x) + log1p(tl.exp(-tl.abs(x)))
        q = tl.where(x < _FAR, tl.exp(0.5 * tl.where(x < _FAR, x, _FAR)), tl.sqrt(softplus))
    return q


@triton.jit
def slope(x, q, KIND: tl.constexpr):
    """The derivative of ``score`` at ``x``, where it is ``q``."""
    # of sigmoid q (1 - q), but 1 - q would have no digits left where q is near 1
    return q * sigmoid(-x) if KIND == "sigmoid" else tl.where(x < _FAR, 0.5 * q, sigmoid(x) / (2.0 * q))


@triton.jit
def softmax_of_rows(x, mask):
    """softmax over the columns that ``mask`` marks, zero in the others; a NaN makes the row NaN, as in torch."""
    e = tl.where(mask, tl.exp(x - tl.max(tl.where(mask, x, float("-inf")), axis=1)[:, None]), 0.0)
    return e / tl.sum(e, axis=1)[:, None]


@triton.jit
def key_of(x, mask):
    """Whole numbers in the order of ``x``, equal for 0 and -0, and for inf and NaN; TAKEN where ``mask`` is False."""
    bits = tl.where(x != x, float("inf"), x).to(tl.int32, bitcast=True)
    sign = bits >> 31
    return tl.where(mask, ((bits & _GREATEST) ^ sign) - sign, TAKEN)


@triton.jit
def take(key, col):
    """The column of the greatest key of each row, the lowest of equal ones, and the keys without it."""
    greatest = tl.max(key, axis=1)
    chosen = tl.min(tl.where(key == greatest[:, None], col[None, :], _GREATEST), axis=1)
    return chosen, tl.where(col[None, :] == chosen[:, None], TAKEN, key)


@triton.jit
def _of_best_groups(
    key, value, col, GROUPS: tl.constexpr, GROUP_TOPK: tl.constexpr, SIZE: tl.constexpr, BEST: tl.constexpr
):  # fmt: skip
    """``key`` with all but the experts of the best groups TAKEN."""
    BLOCK_G: tl.constexpr = triton.next_power_of_2(GROUPS)
    groups = tl.arange(0, BLOCK_G)
    group_of = (col // SIZE)[None, :]
    worth = tl.zeros([key.shape[0], BLOCK_G], dtype=tl.float32)
    for group in range(GROUPS):
        left = tl.where(group_of == group, key, TAKEN)
        total = tl.zeros([key.shape[0]], dtype=tl.float32)
        for _ in range(BEST):
            chosen, left = take(left, col)
            total += tl.sum(tl.where(col[None, :] == chosen[:, None], value, 0.0), axis=1)
        worth = tl.where(groups[None, :] == group, total[:, None], worth)
    left = key_of(worth, (groups < GROUPS)[None, :])
    kept = tl.zeros(key.shape, dtype=tl.int1)
    for _ in range(GROUP_TOPK):
        chosen, left = take(left, groups)
        kept |= group_of == chosen[:, None]
    return tl.where(kept, key, TAKEN)


@triton.jit
def _route_kernel(
    x_ptr, bias_ptr, probs_ptr, indices_ptr, counts_ptr, x_stride, T,
    K: tl.constexpr, KIND: tl.constexpr, SCALE: tl.constexpr,
    GROUPS: tl.constexpr, GROUP_TOPK: tl.constexpr, SIZE: tl.constexpr, BEST: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    E: tl.constexpr = GROUPS * SIZE
    BLOCK_K: tl.constexpr = triton.next_power_of_2(K)
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    col, slot = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    inside, of_row = (row < T)[:, None], (col < E)[None, :]
    x = tl.load(x_ptr + row[:, None] * x_stride + col[None, :], mask=inside & of_row, other=0.0).to(tl.float32)
    value = x
    if GROUPS > 1 or bias_ptr is not None:
        if KIND == "pre_softmax":
            value = softmax_of_rows(x, of_row)
        elif KIND != "softmax":
            value = score(x, KIND)
    by = x
    if bias_ptr is not None:
        value += tl.load(bias_ptr + col, mask=col < E, other=0.0).to(tl.float32)[None, :]
        by = value
    key = key_of(by, of_row)
    if GROUPS > 1:
        key = _of_best_groups(key, value, col, GROUPS, GROUP_TOPK, SIZE, BEST)
    index = tl.zeros([BLOCK_T, BLOCK_K], dtype=tl.int32)
    logit = tl.zeros([BLOCK_T, BLOCK_K], dtype=tl.float32)
    count = tl.zeros([BLOCK_E], dtype=tl.int64)
    for k in range(K):
        chosen, key = take(key, col)
        hit = col[None, :] == chosen[:, None]
        index = tl.where(slot[None, :] == k, chosen[:, None], index)
        logit = tl.where(slot[None, :] == k, tl.sum(tl.where(hit, x, 0.0), axis=1)[:, None], logit)
        count += tl.sum((hit & inside).to(tl.int64), axis=0)
    of_slot = (slot < K)[None, :]
    if KIND == "softmax":
        weight = softmax_of_rows(logit, of_slot)
    elif KIND == "pre_softmax":
        greatest = tl.max(tl.where(of_row, x, float("-inf")), axis=1)[:, None]
        total = tl.sum(tl.where(of_row, tl.exp(x - greatest), 0.0), axis=1)[:, None]
        weight = tl.exp(logit - greatest) / total
    else:
        weight = tl.where(of_slot, score(logit, KIND), 0.0)
        if K > 1:
            weight = weight / (tl.sum(weight, axis=1) + _EPSILON)[:, None]
    at = row[:, None] * K + slot[None, :]
    tl.store(probs_ptr + at, weight * SCALE, mask=inside & of_slot)
    tl.store(indices_ptr + at, index, mask=inside & of_slot)
    tl.atomic_add(counts_ptr + col, count, mask=(col < E) & (count > 0), sem="relaxed")  # whole: in any order the same


@triton.jit
def _route_back_kernel(
    dy_ptr, x_ptr, indices_ptr, dx_ptr, dy_row, dy_slot, x_stride, T, E,
    K: tl.constexpr, KIND: tl.constexpr, SCALE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    col, slot = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    inside, of_row, of_slot = (row < T)[:, None], (col < E)[None, :], (slot < K)[None, :]
    index = tl.load(indices_ptr + row[:, None] * K + slot[None, :], mask=inside & of_slot, other=-1).to(tl.int32)
    g = tl.load(dy_ptr + row[:, None] * dy_row + slot[None, :] * dy_slot, mask=inside & of_slot, other=0.0)
    g = g.to(tl.float32) * SCALE
    dense = tl.zeros([BLOCK_T, BLOCK_E], dtype=tl.float32)
    if KIND == "pre_softmax":
        x = tl.load(x_ptr + row[:, None] * x_stride + col[None, :], mask=inside & of_row, other=0.0).to(tl.float32)
        d = g
    else:
        at = row[:, None] * x_stride + index
        logit = tl.load(x_ptr + at, mask=inside & of_slot, other=0.0).to(tl.float32)
        if KIND == "softmax":
            weight = softmax_of_rows(logit, of_slot)
            d = weight * (g - tl.sum(g * weight, axis=1)[:, None])
        else:
            q = score(logit, KIND)
            d = g
            if K > 1:
                total = (tl.sum(tl.where(of_slot, q, 0.0), axis=1) + _EPSILON)[:, None]
                d = (g - tl.sum(g * q / total, axis=1)[:, None]) / total
            d *= slope(logit, q, KIND)
    for k in range(K):  # compared with all columns, so that each entry of a row is stored once
        chosen = tl.sum(tl.where(slot[None, :] == k, index, 0), axis=1)
        dense = tl.where(
            col[None, :] == chosen[:, None], tl.sum(tl.where(slot[None, :] == k, d, 0.0), axis=1)[:, None], dense
        )
    if KIND == "pre_softmax":
        p = softmax_of_rows(x, of_row)
        dense = p * (dense - tl.sum(dense * p, axis=1)[:, None])
    tl.store(dx_ptr + row[:, None] * E + col[None, :], dense, mask=inside & of_row)


def _route(logits: Tensor, expert_bias: Tensor | None, *options: Unpack[Choice]) -> tuple[Tensor, Tensor, Tensor]:
    probs, indices, num_tokens = OPERATOR.outputs(logits, expert_bias, *options)
    num_tokens.zero_()
    topk, score, num_groups, group_topk, group_score_topk, scale = Choice(*options)
    T, E = logits.shape
    if T:
        logits, tiling = contiguous_columns(logits), tile(E)
        wrap_triton(_route_kernel)[(cdiv(T, tiling["BLOCK_T"]),)](
            logits, None if expert_bias is None else expert_bias.contiguous(), probs, indices, num_tokens,
            logits.stride(0), T, K=topk, KIND=score, SCALE=scale,
            GROUPS=num_groups, GROUP_TOPK=group_topk, SIZE=E // num_groups, BEST=group_score_topk, **tiling,
        )  # fmt: skip
    return probs, indices, num_tokens


def _route_back(dprobs: Tensor, logits: Tensor, indices: Tensor, score: str, scale: float) -> tuple[Tensor]:
    (dlogits,) = OPERATOR.gradients(dprobs, logits, indices, score, scale)
    (T, E), topk = logits.shape, indices.shape[1]
    if T:
        logits, tiling = contiguous_columns(logits), tile(E)
        wrap_triton(_route_back_kernel)[(cdiv(T, tiling["BLOCK_T"]),)](
            dprobs, logits, indices, dlogits, *dprobs.stride(), logits.stride(0), T, E,
            K=topk, KIND=score, SCALE=scale, BLOCK_K=next_power_of_2(topk), **tiling,
        )  # fmt: skip
    return (dlogits,)


op = OPERATOR.register("topk_router", _route, _route_back)
