"""Triton kernels of fused_indices_converter.

T tokens (rows), E experts (columns), K slots. Inputs may be strided in both dimensions: rows of indices are short.
"""

import triton
import triton.language as tl
from torch import Tensor

from megalith.fusions.core.grids import cdiv, next_power_of_2
from megalith.fusions.core.registration import wrap_triton
from megalith.fusions.routing.indices_converter_formulas import TO_INDICES_OPERATOR, TO_MULTIHOT_OPERATOR

__all__ = ["to_indices_op", "to_multihot_op"]

_BLOCK = 1024  # untuned: entries per tile of several tokens
_MAX_BLOCK_E = 4096  # untuned: largest number of columns per tile


@triton.jit
def _to_multihot_kernel(
    indices_ptr, weights_ptr, probs_ptr, multihot_ptr,
    index_row, index_slot, weight_row, weight_slot, T, E, K, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    col = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    inside = row < T
    total = tl.zeros([BLOCK_T, BLOCK_E], dtype=tl.float32)
    found = tl.zeros([BLOCK_T, BLOCK_E], dtype=tl.int1)
    for k in range(K):  # compared with all columns, so that each entry of a row is stored once, and needs no barrier
        index = tl.load(indices_ptr + row * index_row + k * index_slot, mask=inside, other=-1)
        weight = tl.load(weights_ptr + row * weight_row + k * weight_slot, mask=inside, other=0.0).to(tl.float32)
        hit = index[:, None] == col[None, :]
        total += tl.where(hit, weight[:, None], 0.0)
        found |= hit
    at = row[:, None] * E + col[None, :]
    mask = inside[:, None] & (col < E)[None, :]
    tl.store(probs_ptr + at, total, mask=mask)
    if multihot_ptr is not None:
        tl.store(multihot_ptr + at, found, mask=mask)


@triton.jit
def _at_indices_kernel(
    dense_ptr, indices_ptr, out_ptr, dense_row, dense_column, index_row, index_slot, size, E, K, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = at // K
    index = tl.load(indices_ptr + row * index_row + at % K * index_slot, mask=at < size, other=-1)
    local = (index >= 0) & (index < E)
    value = tl.load(dense_ptr + row * dense_row + index * dense_column, mask=local, other=0.0)
    tl.store(out_ptr + at, value, mask=at < size)


@triton.jit
def _to_indices_kernel(
    multihot_ptr, probs_ptr, indices_ptr, weights_ptr,
    hot_row, hot_column, prob_row, prob_column, T, E,
    K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = (row < T)[:, None]
    found = tl.zeros([BLOCK_T], dtype=tl.int32)
    for start in range(0, E, BLOCK_E):
        col = start + tl.arange(0, BLOCK_E)
        at = row[:, None] * hot_row + col[None, :] * hot_column
        hot = tl.load(multihot_ptr + at, mask=inside & (col < E)[None, :], other=0) != 0
        slot = found[:, None] + tl.cumsum(hot.to(tl.int32), axis=1) - 1
        mine = hot & (slot < K)
        weight = tl.load(probs_ptr + row[:, None] * prob_row + col[None, :] * prob_column, mask=mine, other=0.0)
        tl.store(weights_ptr + row[:, None] * K + slot, weight, mask=mine)
        tl.store(indices_ptr + row[:, None] * K + slot, tl.broadcast_to(col[None, :], [BLOCK_T, BLOCK_E]), mask=mine)
        found += tl.sum(hot.to(tl.int32), axis=1)
    slot = tl.arange(0, BLOCK_K)[None, :]
    left = inside & (slot >= found[:, None]) & (slot < K)
    tl.store(weights_ptr + row[:, None] * K + slot, tl.zeros([BLOCK_T, BLOCK_K], dtype=tl.float32), mask=left)
    tl.store(indices_ptr + row[:, None] * K + slot, tl.full([BLOCK_T, BLOCK_K], -1, dtype=tl.int32), mask=left)


def _to_multihot(indices: Tensor, probs_indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    probs, multihot = TO_MULTIHOT_OPERATOR.outputs(indices, probs_indices, num_experts)
    _spread(indices, probs_indices, probs, multihot)
    return probs, multihot


def _to_indices_back(dprobs_indices: Tensor, indices: Tensor, num_experts: int) -> tuple[Tensor]:
    (dprobs,) = TO_INDICES_OPERATOR.gradients(dprobs_indices, indices, num_experts)
    _spread(indices, dprobs_indices, dprobs, None)
    return (dprobs,)


def _spread(indices: Tensor, weights: Tensor, probs: Tensor, multihot: Tensor | None) -> None:
    (T, E), K = probs.shape, indices.shape[1]
    block_t, block_e, num_warps = _tile(E)
    if T:
        wrap_triton(_to_multihot_kernel)[(cdiv(T, block_t), cdiv(E, block_e))](
            indices, weights, probs, multihot, *indices.stride(), *weights.stride(), T, E, K,
            BLOCK_T=block_t, BLOCK_E=block_e, num_warps=num_warps,
        )  # fmt: skip


def _to_multihot_back(dprobs: Tensor, indices: Tensor) -> tuple[Tensor]:
    (dprobs_indices,) = TO_MULTIHOT_OPERATOR.gradients(dprobs, indices)
    if size := indices.numel():
        wrap_triton(_at_indices_kernel)[(cdiv(size, 1024),)](
            dprobs, indices, dprobs_indices, *dprobs.stride(), *indices.stride(), size,
            dprobs.shape[1], indices.shape[1], BLOCK=1024,
        )  # fmt: skip
    return (dprobs_indices,)


def _to_indices(multihot: Tensor, probs: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    probs_indices, indices = TO_INDICES_OPERATOR.outputs(multihot, probs, topk)
    T, E = multihot.shape
    block_t, block_e, num_warps = _tile(E)
    if T:
        wrap_triton(_to_indices_kernel)[(cdiv(T, block_t),)](
            multihot, probs, indices, probs_indices, *multihot.stride(), *probs.stride(), T, E,
            K=topk, BLOCK_T=block_t, BLOCK_E=block_e, BLOCK_K=next_power_of_2(topk),
            num_warps=num_warps,
        )  # fmt: skip
    return probs_indices, indices


def _tile(num_experts: int) -> tuple[int, int, int]:
    """Tokens and columns per tile, and its number of warps."""
    block_e = min(_MAX_BLOCK_E, next_power_of_2(num_experts))
    return max(1, _BLOCK // block_e), block_e, max(4, block_e // 256)


to_multihot_op = TO_MULTIHOT_OPERATOR.register("indices_to_multihot", _to_multihot, _to_multihot_back)
to_indices_op = TO_INDICES_OPERATOR.register("multihot_to_indices", _to_indices, _to_indices_back)
