"""Packs whole texts into rows: best fit, the longest first.

Each text goes to the fullest row that has room for it, or to a new one. Every row is then nearly full unless most texts
are longer than half of one.
"""

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

__all__ = ["pack_rows"]

Numbers = NDArray[np.int64]


def pack_rows(lengths: Numbers, room: int, order: Numbers) -> tuple[Numbers, Numbers]:
    """Packs N items of ``lengths``, each from 1 to ``room``, into R rows.

    Args:
        order: [N], the order in which items of equal length are packed.

    Returns:
        Items [N], and where each row begins in them [R + 1]: row r holds items ``[starts[r]:starts[r + 1]]``, in the
        order of their index.
    """
    rows_with: dict[int, list[int]] = {}  # room that is left -> the rows that have it
    sizes: list[int] = []  # its keys, sorted
    row_of = np.zeros(len(lengths), np.int64)
    left_in: list[int] = []
    longest_first = np.lexsort((order, -lengths))
    for item, length in zip(longest_first.tolist(), lengths[longest_first].tolist(), strict=True):
        at = bisect_left(sizes, length)
        if at < len(sizes):
            row = rows_with[sizes[at]].pop()
            if not rows_with[sizes[at]]:
                del rows_with[sizes[at]], sizes[at]
        else:
            row = len(left_in)
            left_in.append(room)
        row_of[item] = row
        left_in[row] -= length
        _add_(row, left_in[row], rows_with, sizes)
    items = np.argsort(row_of, kind="stable")
    return items, np.searchsorted(row_of[items], np.arange(len(left_in) + 1))


def _add_(row: int, left: int, rows_with: dict[int, list[int]], sizes: list[int]) -> None:
    if left not in rows_with:
        sizes.insert(bisect_left(sizes, left), left)
        rows_with[left] = []
    rows_with[left].append(row)
