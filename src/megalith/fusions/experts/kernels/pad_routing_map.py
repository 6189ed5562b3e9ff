"""Triton kernels of fused_pad_routing_map: each tile of tokens counts, then sets its share of the first zeros."""

import triton
import triton.language as tl
from torch import Tensor

from megalith.fusions.core.registration import register_without_gradient, wrap_triton
from megalith.fusions.experts.kernels.routing import Tiling, before_and_total, count
from megalith.fusions.experts.pad_routing_map_formulas import outputs

__all__ = ["op"]

_CHUNK = 8  # untuned: tiles whose counts are read at a time


@triton.jit
def _pad_kernel(
    map_ptr, padded_ptr, counts_ptr, map_row, map_column, out_row, out_column, num_tiles, T, E, pad_multiple,
    TOKENS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK_E)
    before, total = before_and_total(counts_ptr, tile, num_tiles, col, E, CHUNK)
    missing = (pad_multiple - total % pad_multiple) % pad_multiple
    num_zeros = (tile * TOKENS).to(tl.int32) - before
    for start in range(0, TOKENS, BLOCK_T):
        row = tile * TOKENS + start + tl.arange(0, BLOCK_T)
        mask = (row < T)[:, None] & (col < E)[None, :]
        x = tl.load(map_ptr + row[:, None] * map_row + col[None, :] * map_column, mask=mask, other=1)
        zero = (x == 0).to(tl.int32)
        added = (x == 0) & (num_zeros[None, :] + tl.cumsum(zero, axis=0) <= missing[None, :])
        tl.store(padded_ptr + row[:, None] * out_row + col[None, :] * out_column, tl.where(added, 1, x), mask=mask)
        num_zeros += tl.sum(zero, axis=0)


def _pad(routing_map: Tensor, pad_multiple: int) -> Tensor:
    padded = outputs(routing_map, pad_multiple)
    if padded.numel():
        T, E = routing_map.shape
        tiling = Tiling.of(T, E)
        counts = count(routing_map, E, None, tiling)
        wrap_triton(_pad_kernel)[(tiling.num_tiles,)](
            routing_map, padded, counts, *routing_map.stride(), *padded.stride(), tiling.num_tiles, T, E, pad_multiple,
            TOKENS=tiling.tokens, BLOCK_T=tiling.block_t, BLOCK_E=tiling.block_e, CHUNK=_CHUNK,
            num_warps=tiling.num_warps,
        )  # fmt: skip
    return padded


op = register_without_gradient("pad_routing_map", _pad, outputs)
