"""Runs a formula over blocks of rows that stay in a CPU's cache, so that memory sees each tensor once.

A formula in plain torch makes a pass over memory for every operation in it. On blocks of half a megabyte for each
thread those passes stay in the caches, and what is left is what a fused kernel moves: inputs and outputs, once.
Sums over rows are added block by block: their last bits follow the number of threads, as those of torch's own sums do.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megalith.fusions.core.rows import fresh_like

__all__ = ["LARGEST_WHOLE", "Results", "blocks", "by_blocks", "extent", "widened_by_blocks"]

# a tensor that is no larger takes the reference by default: there is nothing to cut
LARGEST_WHOLE = 2**17
# of 2^14 to 2^18 the fastest for most, on two cores with 2 MiB of L2 each; below 2^15 torch takes one thread for all
_THREAD_ELEMENTS = 2**17

Results = tuple[Tensor, ...]


def blocks(num_rows: int, row_elements: int, at_once: int = 1) -> Iterator[slice]:
    """Slices of ``num_rows`` rows, in order, of about ``at_once`` * 130,000 elements a thread, one row at least."""
    step = max(1, at_once * _THREAD_ELEMENTS * torch.get_num_threads() // max(1, row_elements))
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def by_blocks(
    formula: Callable[..., Results],
    rows: Sequence[Tensor | None],
    outputs: Sequence[Tensor],
    sums: Sequence[Tensor] = (),
) -> None:
    """Fills ``outputs`` [T, ...] with ``formula`` of the ``rows`` [T, ...], block by block.

    ``formula`` gets the block of each of ``rows`` (None stays None) and returns the block of each of ``outputs``, then
    what the block adds to each of ``sums``: zero at first, and in float32 or wider, for gradients of what all rows
    share.
    """
    num_rows, widest = extent((*outputs, *rows))
    with torch.no_grad():
        for block in blocks(num_rows, widest):
            results = formula(*(None if x is None else x[block] for x in rows))
            _take_results(results, [output[block] for output in outputs], sums)


def widened_by_blocks(
    formula: Callable[..., Results],
    rows: Sequence[Tensor | None],
    outputs: Sequence[Tensor],
    sums: Sequence[Tensor] = (),
    *,
    acc: torch.dtype,
) -> None:
    """``by_blocks`` for a formula of ``rows`` in the dtype ``acc``, that can write its results where they belong.

    Narrower floats come widened, in memory that all blocks share: pages that are fresh to each would cost more than the
    formula. After its rows ``formula`` gets a list: for the ``out`` of the last operation, the block of each of
    ``outputs`` that has the dtype ``acc``, and None for the others, which are rounded from what it returns.
    """
    num_rows, widest = extent((*outputs, *rows))
    memory: dict[int, Tensor] = {}

    def widened(index: int, x: Tensor | None) -> Tensor | None:
        if x is None or x.dtype == acc or not x.is_floating_point():
            return x
        if index not in memory:
            memory[index] = fresh_like(x, acc)  # the first block is the longest
        return memory[index][: len(x)].copy_(x)

    with torch.no_grad():
        for block in blocks(num_rows, widest):
            targets = [output[block] for output in outputs]
            wide_rows = [widened(index, None if x is None else x[block]) for index, x in enumerate(rows)]
            out = [target if target.dtype == acc else None for target in targets]
            _take_results(formula(*wide_rows, out), targets, sums)


def extent(given: Sequence[Tensor | None]) -> tuple[int, int]:
    """How many rows there are, and the elements of the widest."""
    tensors = [x for x in given if x is not None]
    return tensors[0].shape[0], max(x[:1].numel() for x in tensors)


def _take_results(results: Results, targets: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
    for target, result in zip(targets, results, strict=False):
        if result is not target:
            target.copy_(result)
    for total, result in zip(sums, results[len(targets) :], strict=True):
        total += result
