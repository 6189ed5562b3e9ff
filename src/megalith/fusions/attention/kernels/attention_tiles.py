"""What the attention kernels share: which keys a query sees, loads of blocks of rows, sizes of blocks.

A query sees an interval of keys whose ends never fall from one query to the next. So for a block of queries the keys
from the highest begin to the lowest end are seen by all of it, and need no mask; those further out, to the lowest begin
and the highest end, are seen by some; all others by none, and are not read. Seen from the keys it is the same.
"""

from collections.abc import Mapping
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from megalith.fusions.core.devices import has_large_memory
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
    """How a kernel cuts its work: queries and keys in a block, warps, and stages of its pipeline of loads."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int


Table = Mapping[tuple[int, int], Blocks]  # by bytes of an element, and columns up to


def block_columns(x: Tensor) -> int:
    """The columns of a block that holds rows of ``x``: a power of two, 16 at least, for matrix units."""
    return max(16, int(triton.next_power_of_2(x.shape[-1])))


def blocks_of(q: Tensor, columns: int, general: Table, large: Table) -> Blocks:
    """Those for heads of ``columns``: of ``large``, where it has some and the GPU has the shared memory of an H100."""
    key = q.element_size(), columns
    return large[key] if key in large and has_large_memory(q) else general[key]


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """Of each of ``tensors`` [S, B, heads, D] the strides of its first three axes."""
    return tuple(stride for x in tensors for stride in x.stride()[:3])


def cap_of(scale: float, softcap: float | None) -> float | None:
    """The cap of q . k, before its scale, that keeps scores within ``softcap``."""
    return None if softcap is None else softcap / scale


# tl.dot takes the bits of bfloat16 for integers in the interpreter
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
