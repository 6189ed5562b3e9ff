"""Counts of routed tokens per tile of tokens and expert, shared by padding a routing map and permuting tokens.

First each tile counts its tokens per expert; then each tile sums the counts of the tiles before it, which gives the
position of its first token in each expert. Two launches, no atomics, and the same result in any order of execution.
A routing is a map [T, E], whose nonzero entries are routed, or indices [T, K], where those in [0, E) are routed.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalith.fusions.core.grids import cdiv, next_power_of_2
from megalith.fusions.core.registration import wrap_triton

__all__ = ["Tiling", "before_and_total", "count", "num_routed"]

_BLOCK = 2048  # untuned: entries per block
_MIN_TOKENS = 128  # untuned: at least per tile, so that its 4-byte counts are few compared to the 1-byte map
_MAX_TILES = 256  # untuned: each tile reads the counts of all tiles, so beyond this number tiles grow instead


class Tiling(NamedTuple):
    """Tiles of TOKENS tokens, each processed in blocks of BLOCK_T tokens and all experts."""

    num_tiles: int
    tokens: int
    block_t: int
    block_e: int
    num_warps: int = 8

    @classmethod
    def of(cls, num_tokens: int, num_experts: int) -> "Tiling":
        """The tiles of a routing of ``num_tokens`` tokens, at least one, to ``num_experts`` experts."""
        block_e = next_power_of_2(num_experts)
        block_t = max(1, _BLOCK // block_e)
        least = max(_MIN_TOKENS, cdiv(num_tokens, _MAX_TILES))
        tokens = cdiv(least, block_t) * block_t
        return cls(cdiv(num_tokens, tokens), tokens, block_t, block_e)


@triton.jit
def num_routed(routing_ptr, row, col, row_stride, col_stride, T, E, K: tl.constexpr):
    """How often token ``row`` is routed to expert ``col``, int32; K is None for a map."""
    inside = row < T
    if K is None:
        mask = inside[:, None] & (col < E)[None, :]
        at = row[:, None] * row_stride + col[None, :] * col_stride
        routed = (tl.load(routing_ptr + at, mask=mask, other=0) != 0).to(tl.int32)
    else:
        routed = tl.zeros([row.shape[0], col.shape[0]], dtype=tl.int32)
        for k in range(K):
            index = tl.load(routing_ptr + row * row_stride + k * col_stride, mask=inside, other=-1)
            routed += (index[:, None] == col[None, :]).to(tl.int32)
    return routed


@triton.jit
def _count_kernel(
    routing_ptr, counts_ptr, row_stride, col_stride, T, E,
    K: tl.constexpr, TOKENS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK_E)
    total = tl.zeros([BLOCK_E], dtype=tl.int32)
    for start in range(0, TOKENS, BLOCK_T):
        row = tile * TOKENS + start + tl.arange(0, BLOCK_T)
        total += tl.sum(num_routed(routing_ptr, row, col, row_stride, col_stride, T, E, K), axis=0)
    tl.store(counts_ptr + tile * E + col, total, mask=col < E)


@triton.jit
def before_and_total(counts_ptr, tile, num_tiles, col, E, CHUNK: tl.constexpr):
    """Tokens of each expert in the tiles before ``tile``, and in all."""
    before = tl.zeros([col.shape[0]], dtype=tl.int32)
    total = tl.zeros([col.shape[0]], dtype=tl.int32)
    for start in range(0, num_tiles, CHUNK):
        other = start + tl.arange(0, CHUNK)[:, None]
        count = tl.load(counts_ptr + other * E + col[None, :], mask=(other < num_tiles) & (col < E)[None, :], other=0)
        before += tl.sum(tl.where(other < tile, count, 0), axis=0)
        total += tl.sum(count, axis=0)
    return before, total


def count(routing: Tensor, num_experts: int, num_slots: int | None, tiling: Tiling) -> Tensor:
    """How many tokens of each tile are routed to each expert, int32 [tiles, E]; ``num_slots`` is None for a map."""
    counts = torch.empty(tiling.num_tiles, num_experts, dtype=torch.int32, device=routing.device)
    wrap_triton(_count_kernel)[(tiling.num_tiles,)](
        routing, counts, *routing.stride(), routing.shape[0], num_experts,
        K=num_slots, TOKENS=tiling.tokens, BLOCK_T=tiling.block_t, BLOCK_E=tiling.block_e,
        num_warps=tiling.num_warps,
    )  # fmt: skip
    return counts
