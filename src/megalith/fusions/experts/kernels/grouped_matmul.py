"""Triton kernels of grouped_matmul: a program computes a tile of one expert's rows, or of one expert's dw.

Each program finds its expert from the sizes, which only the device knows. There are as many programs as there can be
tiles, R / BLOCK_ROWS plus one per expert; those left over write nothing. Rows after those of all experts are filled
with zeros.

R rows, E experts. Rows and matrices may be strided; their columns are contiguous.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from megalith.fusions.core.devices import has_large_memory
from megalith.fusions.core.grids import cdiv, next_power_of_2
from megalith.fusions.core.registration import wrap_triton
from megalith.fusions.core.rows import contiguous_columns
from megalith.fusions.experts.grouped_matmul_formulas import OPERATOR
from megalith.optional import triton_interprets

__all__ = ["op"]

_INTERPRETED = tl.constexpr(triton_interprets())  # tl.dot treats the bits of bfloat16 as integers there


class _Blocks(NamedTuple):
    """Launch parameters: the tile of the result, the size summed per step, warps, and pipeline stages of the loads."""

    BLOCK_ROWS: int
    BLOCK_COLUMNS: int
    BLOCK_SUM: int
    num_warps: int
    num_stages: int


# untuned; keys are bytes per element
_BLOCKS = {2: _Blocks(128, 128, 64, 8, 3), 4: _Blocks(64, 64, 32, 4, 2)}
_LARGE_BLOCKS = {2: _Blocks(128, 256, 64, 8, 4)}  # from a sweep on an H200, where it is 1.1 to 2.1 times as fast


@triton.jit
def _load(ptr, row, column, stride, num_rows, num_columns):
    """Entries of a matrix; zeros outside of it."""
    at = ptr + row.to(tl.int64)[:, None] * stride + column[None, :]  # row * stride passes 2^31 in a large batch
    x = tl.load(at, mask=(row < num_rows)[:, None] & (column < num_columns)[None, :], other=0.0)
    if _INTERPRETED:
        x = x.to(tl.float32)
    return x


@triton.jit
def _by_matrices_kernel(
    x_ptr, weight_ptr, sizes_ptr, y_ptr, x_stride, expert_stride, weight_stride,
    R, E, num_summed, num_columns,
    TRANSPOSED: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_SUM: tl.constexpr,
):  # fmt: skip
    """Rows times the matrices [num_summed, num_columns] of their experts, of which TRANSPOSED ones are in memory."""
    tile = tl.program_id(0)  # one after the other share a matrix
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    group = tl.arange(0, BLOCK_E)
    size = tl.load(sizes_ptr + group, mask=group < E, other=0)
    size = tl.where(group == E, tl.maximum(R - tl.sum(size, axis=0), 0), size)  # rows of no expert, a group too
    tiles = (size + BLOCK_ROWS - 1) // BLOCK_ROWS
    mine = tl.sum((tl.cumsum(tiles, axis=0) <= tile).to(tl.int32), axis=0)  # past E for a tile that is left over
    first = tl.sum(tl.where(group < mine, size, 0), axis=0)
    end = tl.minimum(first + tl.sum(tl.where(group == mine, size, 0), axis=0), R)
    row = first + (tile - tl.sum(tl.where(group < mine, tiles, 0), axis=0)) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    weight_ptr += mine.to(tl.int64) * expert_stride
    y = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for start in range(0, tl.where(mine < E, num_summed, 0), BLOCK_SUM):
        summed = start + tl.arange(0, BLOCK_SUM)
        x = _load(x_ptr, row, summed, x_stride, end, num_summed)
        if TRANSPOSED:
            matrix = tl.trans(_load(weight_ptr, column, summed, weight_stride, num_columns, num_summed))
        else:
            matrix = _load(weight_ptr, summed, column, weight_stride, num_summed, num_columns)
        y = tl.dot(x, matrix, y, input_precision="ieee")
    at = y_ptr + row.to(tl.int64)[:, None] * num_columns + column[None, :]
    tl.store(at, y, mask=(row < end)[:, None] & (column < num_columns)[None, :])


@triton.jit
def _by_rows_kernel(
    dy_ptr, x_ptr, sizes_ptr, dweight_ptr, dy_stride, x_stride, R, F, H, num_tiles,
    BLOCK_E: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_SUM: tl.constexpr,
):  # fmt: skip
    """A tile of one expert's dw [F, H], over all rows of the expert, in order."""
    tile, expert = tl.program_id(0), tl.program_id(1)
    f = tile // num_tiles * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    h = tile % num_tiles * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    other = tl.arange(0, BLOCK_E)
    first = tl.sum(tl.load(sizes_ptr + other, mask=other < expert, other=0), axis=0)
    end = tl.minimum(first + tl.load(sizes_ptr + expert), R)
    dweight = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for start in range(first, end, BLOCK_SUM):
        row = start + tl.arange(0, BLOCK_SUM)
        dy = _load(dy_ptr, row, f, dy_stride, end, F)
        x = _load(x_ptr, row, h, x_stride, end, H)
        dweight = tl.dot(tl.trans(dy), x, dweight, input_precision="ieee")
    at = dweight_ptr + (expert.to(tl.int64) * F + f)[:, None] * H + h[None, :]
    tl.store(at, dweight, mask=(f < F)[:, None] & (h < H)[None, :])


def _blocks_of(x: Tensor) -> _Blocks:
    size = x.element_size()
    return _LARGE_BLOCKS[size] if size in _LARGE_BLOCKS and has_large_memory(x) else _BLOCKS[size]


def _multiply(x: Tensor, weight: Tensor, sizes: Tensor, y: Tensor, transposed: bool) -> None:
    (R, num_summed), num_columns, E = x.shape, y.shape[1], len(sizes)
    x, weight, blocks = contiguous_columns(x), contiguous_columns(weight), _blocks_of(x)
    num_tiles = cdiv(R, blocks.BLOCK_ROWS) + E
    wrap_triton(_by_matrices_kernel)[(num_tiles, cdiv(num_columns, blocks.BLOCK_COLUMNS))](
        x, weight, sizes.contiguous(), y, x.stride(0), *weight.stride()[:2], R, E, num_summed, num_columns,
        TRANSPOSED=transposed, BLOCK_E=next_power_of_2(E + 1), **blocks._asdict(),
    )  # fmt: skip


def _forward(x: Tensor, weight: Tensor, rows_per_expert: Tensor) -> Tensor:
    y = OPERATOR.outputs(x, weight, rows_per_expert)
    if y.numel():
        _multiply(x, weight, rows_per_expert, y, transposed=True)
    return y


def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, rows_per_expert: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor]:
    dx, dweight = OPERATOR.gradients(dy, x, weight, rows_per_expert, needs)
    if dx.numel():
        _multiply(dy, weight, rows_per_expert, dx, transposed=False)
    if dweight.numel():
        _, F, H = weight.shape
        dy, x, blocks = contiguous_columns(dy), contiguous_columns(x), _blocks_of(x)
        num_tiles = cdiv(H, blocks.BLOCK_COLUMNS)
        E = len(rows_per_expert)
        wrap_triton(_by_rows_kernel)[(cdiv(F, blocks.BLOCK_ROWS) * num_tiles, E)](
            dy, x, rows_per_expert.contiguous(), dweight, dy.stride(0), x.stride(0), len(x), F, H, num_tiles,
            BLOCK_E=next_power_of_2(E), **blocks._asdict(),
        )  # fmt: skip
    return dx, dweight


op = OPERATOR.register("grouped_matmul", _forward, _backward)
