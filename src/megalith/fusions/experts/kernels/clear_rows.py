"""Triton kernel that fills the last rows of a matrix with zeros, where only the device knows how many."""

import triton
import triton.language as tl
from torch import Tensor

from megalith.fusions.core.grids import cdiv

__all__ = ["clear_after_"]

_ROWS, _COLUMNS = 16, 512  # untuned


@triton.jit
def _clear_kernel(y_ptr, ends_ptr, R, num_columns, E, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    start = tl.program_id(0) * BLOCK_ROWS
    end = tl.load(ends_ptr + E - 1)
    row = start + tl.arange(0, BLOCK_ROWS)
    for first in range(0, tl.where(start + BLOCK_ROWS > end, num_columns, 0), BLOCK_COLUMNS):
        column = first + tl.arange(0, BLOCK_COLUMNS)
        at = y_ptr + row.to(tl.int64)[:, None] * num_columns + column[None, :]
        tl.store(at, 0.0, mask=((row >= end) & (row < R))[:, None] & (column < num_columns)[None, :])


def clear_after_(y: Tensor, ends: Tensor) -> None:
    """Fills the rows of ``y``, contiguous, after ``ends[-1]`` with zeros. Not an operator: call it inside one."""
    grid = (cdiv(y.shape[0], _ROWS),)
    _clear_kernel[grid](y, ends, *y.shape, len(ends), BLOCK_ROWS=_ROWS, BLOCK_COLUMNS=_COLUMNS)
