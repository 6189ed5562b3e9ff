"""Triton kernels of row_map: each tile of tokens counts, then places its tokens after those of the tiles before it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalith.fusions.core.registration import register_without_gradient, wrap_triton
from megalith.fusions.experts.kernels.routing import Tiling, before_and_total, count, num_routed
from megalith.fusions.experts.row_map_formulas import outputs

__all__ = ["op"]

_CHUNK = 8  # untuned: tiles whose counts are read at a time


@triton.jit
def _place_kernel(
    routing_ptr, counts_ptr, row_of_ptr, token_of_ptr, rows_per_expert_ptr,
    row_stride, col_stride, num_tiles, T, E, R, pad_multiple,
    K: tl.constexpr, TOKENS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK_E)
    before, total = before_and_total(counts_ptr, tile, num_tiles, col, E, CHUNK)
    padded = (total + pad_multiple - 1) // pad_multiple * pad_multiple
    end = tl.cumsum(padded, axis=0)
    if tile == 0:
        num_rows = tl.minimum(end, R) - tl.minimum(end - padded, R)
        tl.store(rows_per_expert_ptr + col, num_rows, mask=col < E)
    base = end - padded + before  # the row of this tile's next token, for each expert
    for start in range(0, TOKENS, BLOCK_T):
        token = tile * TOKENS + start + tl.arange(0, BLOCK_T)
        inside = token < T
        routed = num_routed(routing_ptr, token, col, row_stride, col_stride, T, E, K)
        place = base[None, :] + tl.cumsum(routed, axis=0) - routed
        if K is None:
            row = tl.where((routed > 0) & (place < R), place, -1)
            tl.store(row_of_ptr + token[:, None] * E + col[None, :], row, mask=inside[:, None] & (col < E)[None, :])
            owner = tl.broadcast_to(token[:, None], [BLOCK_T, BLOCK_E])
            tl.store(token_of_ptr + row, owner, mask=row >= 0)
        else:
            for k in range(K):
                index = tl.load(routing_ptr + token * row_stride + k * col_stride, mask=inside, other=-1)
                hit = (index[:, None] == col[None, :]) & (col < E)[None, :]
                row = tl.max(tl.where(hit & (place < R), place, -1), axis=1)
                place += hit.to(tl.int32)  # an expert named twice by a token has two rows
                tl.store(row_of_ptr + token * K + k, row, mask=inside)
                tl.store(token_of_ptr + row, token, mask=row >= 0)
        base += tl.sum(routed, axis=0)


def _row_map(routing_map: Tensor, num_rows: int, num_experts: int, pad_multiple: int) -> tuple[Tensor, Tensor, Tensor]:
    row_of, token_of, rows_per_expert = outputs(routing_map, num_rows, num_experts, pad_multiple)
    token_of.fill_(-1)  # gaps, whose positions only the device knows
    T, S = routing_map.shape
    if row_of.numel() == 0:
        return row_of, token_of, rows_per_expert.zero_()
    num_slots, tiling = None if routing_map.dtype == torch.bool else S, Tiling.of(T, num_experts)
    counts = count(routing_map, num_experts, num_slots, tiling)
    wrap_triton(_place_kernel)[(tiling.num_tiles,)](
        routing_map, counts, row_of, token_of, rows_per_expert, *routing_map.stride(),
        tiling.num_tiles, T, num_experts, num_rows, pad_multiple,
        K=num_slots, TOKENS=tiling.tokens, BLOCK_T=tiling.block_t, BLOCK_E=tiling.block_e, CHUNK=_CHUNK,
        num_warps=tiling.num_warps,
    )  # fmt: skip
    return row_of, token_of, rows_per_expert


op = register_without_gradient("row_map", _row_map, outputs)
