"""Runs a formula over blocks of rows that stay in a CPU's cache, so that memory sees each tensor once.

A formula in plain torch makes a pass over memory for every operation in it. On blocks of half a megabyte those passes
stay in the cache, and what is left is what a fused kernel moves: the inputs once, the outputs once.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["BLOCK_ELEMENTS", "blocks", "by_blocks"]

# elements of the widest tensor in a block; of 2^14 to 2^20, the fastest for gated units on two cores with 2 MiB of L2
BLOCK_ELEMENTS = 2**17


def blocks(num_rows: int, row_elements: int) -> Iterator[slice]:
    """Slices of ``num_rows`` rows, in order, each of about 130,000 elements, and of one row at least."""
    step = max(1, BLOCK_ELEMENTS // max(1, row_elements))
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def by_blocks(
    formula: Callable[..., tuple[Tensor, ...]],
    rows: Sequence[Tensor | None],
    outputs: Sequence[Tensor],
    sums: Sequence[Tensor] = (),
) -> None:
    """Fills ``outputs`` [T, ...] with ``formula`` of the ``rows`` [T, ...], block by block.

    ``formula`` gets the block of each of ``rows`` (None stays None) and returns the block of each of ``outputs``, then
    what the block adds to each of ``sums``: zero at first, and in float32 or wider, for gradients of what all rows
    share. Blocks are added in order, so the result does not depend on the number of threads.
    """
    given = [x for x in (*outputs, *rows) if x is not None]
    num_rows, widest = given[0].shape[0], max(x[:1].numel() for x in given)
    with torch.no_grad():
        for block in blocks(num_rows, widest):
            results = formula(*(None if x is None else x[block] for x in rows))
            for output, result in zip(outputs, results, strict=False):
                output[block] = result
            for total, result in zip(sums, results[len(outputs) :], strict=True):
                total += result
