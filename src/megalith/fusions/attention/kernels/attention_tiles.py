"""Shared by the attention kernels: which keys a query sees, loads of blocks of rows, and block sizes.

A query sees an interval of keys, whose ends never decrease from one query to the next. For a block of queries, the keys
from the highest start to the lowest end are seen by all queries and need no mask; keys further out, to the lowest start
and the highest end, are seen by some; all others are not read. The same holds for the queries that see a block of keys.
"""

from collections.abc import Mapping
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from megalith.fusions.core.devices import has_large_memory
from megalith.fusions.core.grids import next_power_of_2
from megalith.fusions.core.kernels.activations import tanh_and_slope
from megalith.optional import triton_interprets

__all__ = [
    "Blocks",
    "block_columns",
    "blocks_of",
    "cap_of",
    "capped",
    "capped_and_slope",
    "interval",
    "load_rows",
    "strides",
    "walk",
]


class Blocks(NamedTuple):
    """Launch parameters of a kernel: queries and keys per block, warps, and pipeline stages of its loads."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int


Table = Mapping[tuple[int, int], Blocks]  # keys are (bytes per element, largest number of columns)


def block_columns(x: Tensor) -> int:
    """Columns of a block that holds rows of ``x``: a power of two, at least 16 for tensor cores."""
    return max(16, int(next_power_of_2(x.shape[-1])))


def blocks_of(q: Tensor, columns: int, general: Table, large: Table) -> Blocks:
    """The blocks for heads of ``columns``: from ``large`` if it has them and the GPU has an H100's shared memory."""
    key = q.element_size(), columns
    return large[key] if key in large and has_large_memory(q) else general[key]


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """The strides of the first three dimensions of each of ``tensors`` [S, B, heads, D]."""
    return tuple(stride for x in tensors for stride in x.stride()[:3])


def cap_of(scale: float, softcap: float | None) -> float | None:
    """The cap for q . k before scaling that limits the scaled scores to ``softcap``."""
    return None if softcap is None else softcap / scale


# in the interpreter, tl.dot treats the bits of bfloat16 as integers
INTERPRETED = tl.constexpr(triton_interprets())


@triton.jit
def capped(s, CAP: tl.constexpr):
    """CAP tanh(s / CAP); ``s`` itself where CAP is None."""
    s, _ = capped_and_slope(s, CAP)
    return s


@triton.jit
def capped_and_slope(s, CAP: tl.constexpr):
    """``capped(s)`` and its derivative."""
    slope = 1.0
    if CAP is not None:
        s, slope = tanh_and_slope(s * (1.0 / CAP))
        s *= CAP
    return s, slope


@triton.jit
def interval(i, size, shift, before, after, num, bounds_ptr):
    """The interval of ``num`` others, [low, high), of each ``i`` of ``size``, which is beside ``i + shift``.

    Nothing goes with what is past the end.
    """
    low = tl.maximum(i + shift - before, 0)
    high = tl.minimum(i + shift + after + 1, num)
    if bounds_ptr is not None:
        low = tl.maximum(low, tl.load(bounds_ptr + 2 * i, mask=i < size, other=0))
        high = tl.minimum(high, tl.load(bounds_ptr + 2 * i + 1, mask=i < size, other=0))
    return tl.where(i < size, low, num), tl.where(i < size, high, 0)


@triton.jit
def walk(low, high, BLOCK: tl.constexpr):
    """(begin, end, full_low, full_high): blocks with any others, and among them those that all of the block go with."""
    begin = tl.min(low, axis=0) // BLOCK * BLOCK
    return begin, tl.max(high, axis=0), tl.max(low, axis=0), tl.min(high, axis=0) - BLOCK + 1


@triton.jit
def load_rows(ptr, row, stride, num_rows, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of ``COLUMNS`` columns, with zeros behind them and below the last."""
    column = tl.arange(0, BLOCK)
    at = ptr + row.to(tl.int64)[:, None] * stride + column[None, :]  # row * stride passes 2^31 in a large batch
    mask = (row < num_rows)[:, None]
    if COLUMNS < BLOCK:
        mask &= (column < COLUMNS)[None, :]
    x = tl.load(at, mask=mask, other=0.0)
    if INTERPRETED:
        x = x.to(tl.float32)
    return x
