"""Layout-independent initial weights: element i of a tensor is a function of (seed, name, i).

A rank requests its own slice of a tensor, of any size and offset, and gets the bits that one process would have
computed for the whole. Element (row r, column c) of a tensor of R rows and C columns is word c % 4 of the Philox
counter r * ceil(C / 4) + c // 4; leading dimensions are flattened into rows. Box-Muller in float64 turns 24 bits of
each of two words into two normal numbers, which are rounded to float32. Other dtypes are casts of these float32 values.
Every operation involved has a unique correct result (``numerics.elementary``), so the bits are the same on every
processor and device.

Source: Box and Muller 1958, "A note on the generation of random normal deviates".
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megalith.errors import ShapeError
from megalith.numerics.elementary import cos_sin_of_turn, log
from megalith.numerics.philox import counters_per_chunk, key_of, low_and_high, philox4x32

__all__ = ["normal_shard"]

_BITS = 24  # of each word


def normal_shard(
    seed: int,
    name: str,
    shape: Sequence[int],
    offset: Sequence[int],
    size: Sequence[int],
    std: float,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Returns the slice [offset, offset + size) of the normal tensor ``name`` of mean 0 and standard deviation ``std``.

    Args:
        seed: of the run; forms the Philox key together with ``name``.
        name: of the whole tensor, the same in every layout.
        shape: of the whole tensor, with at least one dimension.
        offset: start of the slice, one number per dimension.
        size: of the slice, one number per dimension; a 0 results in an empty tensor.
        std: standard deviation.
        dtype: of the result, floating; the numbers are computed in float32 and cast.
        device: of the computation and the result.

    Raises:
        ShapeError: ``shape`` has no dimensions, or the slice does not lie inside it.
    """
    _check(name, shape, offset, size)
    out = torch.empty(tuple(size), dtype=dtype, device=device)
    if out.numel() == 0:
        return out
    rows = out.view(-1, size[-1])
    key = key_of(seed, name)
    quads_per_row = -(-shape[-1] // 4)
    for first, last, left, right in _chunks(rows.shape[0], offset[-1], size[-1], counters_per_chunk(out.device)):
        row_ids = _row_ids(first, last, shape, offset, size, out.device)
        quads = torch.arange(left // 4, -(-right // 4), device=out.device)
        counters = row_ids[:, None] * quads_per_row + quads  # [rows, quads]
        zero = torch.zeros((), dtype=torch.int64, device=out.device)
        words = philox4x32(*low_and_high(counters), zero, zero, *key)
        normals = _box_muller(*words).flatten(-2) * std  # [rows, 4 quads]
        skipped = left % 4
        rows[first:last, left - offset[-1] : right - offset[-1]] = normals[:, skipped : skipped + right - left]
    return out


def _check(name: str, shape: Sequence[int], offset: Sequence[int], size: Sequence[int]) -> None:
    if not shape:
        raise ShapeError(f"{name}: the tensor must have at least one dimension; got shape []; use [1]")
    if not len(shape) == len(offset) == len(size):
        raise ShapeError(
            f"{name}: offset and size must have one number for each dimension of shape {list(shape)}; "
            f"got offset {list(offset)} and size {list(size)}"
        )
    if any(o < 0 or n < 0 or o + n > whole for whole, o, n in zip(shape, offset, size, strict=True)):
        raise ShapeError(
            f"{name}: the slice must lie inside shape {list(shape)}; got offset {list(offset)} and size {list(size)}"
        )


def _chunks(num_rows: int, left: int, width: int, num_counters: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields blocks (first row, last row, left column, right column) that tile the slice.

    Each has about ``num_counters`` counters. Rows are relative to the slice and columns to the whole tensor, where
    blocks begin at multiples of 4.
    """
    right = left + width
    columns = min(4 * num_counters, 4 * (-(-right // 4) - left // 4))
    rows = max(1, 4 * num_counters // columns)
    for first in range(0, num_rows, rows):
        for start in range(left - left % 4, right, columns):
            yield first, min(first + rows, num_rows), max(start, left), min(start + columns, right)


def _row_ids(
    first: int, last: int, shape: Sequence[int], offset: Sequence[int], size: Sequence[int], device: torch.device
) -> Tensor:
    """Returns the rows ``first`` to ``last`` of the slice as row indices of the whole tensor."""
    ids = torch.arange(first, last, device=device)
    found, rows = torch.zeros_like(ids), 1  # rows of the whole tensor spanned by one step of ``dim``
    for dim in reversed(range(len(shape) - 1)):
        found += (ids % size[dim] + offset[dim]) * rows
        ids, rows = ids // size[dim], rows * shape[dim]
    return found


def _box_muller(w0: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """Returns four standard normal numbers from four words: [..., 4], float32."""
    radius = torch.stack([w0, w2], dim=-1)
    angle = torch.stack([w1, w3], dim=-1)
    # map to (0, 1], since log(0) is infinite; log(1) may be slightly above 0
    radius = (-2.0 * log(((radius >> 8) + 1).double() * 2.0**-_BITS)).clamp_(min=0.0).sqrt_()
    cos, sin = cos_sin_of_turn(angle >> 8, _BITS)
    return torch.stack([radius * cos, radius * sin], dim=-1).flatten(-2).float()
