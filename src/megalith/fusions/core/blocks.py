"""Runs a formula over blocks of rows that fit in a CPU's cache, so that each tensor passes through memory once.

A formula in plain torch makes one pass over memory per operation. On blocks of half a megabyte per thread those passes
stay in the caches, and the remaining memory traffic is that of a fused kernel: inputs and outputs, once.

Sums over rows are accumulated block by block, so their last bits depend on the number of threads, as with torch's own
sums.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megalith.fusions.core.rows import fresh_like

__all__ = ["LARGEST_WHOLE", "Results", "add_rows_", "blocks", "by_blocks", "extent", "widened_by_blocks"]

# tensors up to this many elements take the reference by default: they fit in one block
LARGEST_WHOLE = 2**17
# fastest of 2^14 to 2^18 for most formulas, on two cores with 2 MiB of L2 each; below 2^15 torch uses one thread
_THREAD_ELEMENTS = 2**17

Results = tuple[Tensor, ...]


def blocks(num_rows: int, row_elements: int, at_once: int = 1) -> Iterator[slice]:
    """Consecutive slices of ``num_rows`` rows, about ``at_once`` * 130,000 elements per thread, at least a row."""
    step = max(1, at_once * _THREAD_ELEMENTS * torch.get_num_threads() // max(1, row_elements))
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def by_blocks(
    formula: Callable[..., Results],
    rows: Sequence[Tensor | None],
    outputs: Sequence[Tensor],
    sums: Sequence[Tensor] = (),
) -> None:
    """Fills ``outputs`` [T, ...] by applying ``formula`` to ``rows`` [T, ...], block by block.

    ``formula`` gets the block of each of ``rows`` (None stays None). It returns the block of each of ``outputs``,
    followed by the block's contribution to each of ``sums``: rows to be summed, or their sum. The caller passes
    ``sums`` [n] as zeros, integers or in float32 or wider; they are for gradients of operands that all rows share.
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
    """``by_blocks`` for a formula that takes ``rows`` in the dtype ``acc`` and can write its results in place.

    Narrower floats are widened into buffers that all blocks reuse: fresh pages for each block would cost more than the
    formula. After the rows, ``formula`` gets a list with one entry per output, to be passed as ``out`` of the last
    operation: the output's block if its dtype is ``acc``, else None, in which case the returned value is rounded into
    it.
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
    """Number of rows, and elements per row of the widest tensor."""
    tensors = [x for x in given if x is not None]
    num_rows = tensors[0].shape[0]
    return num_rows, max([x.numel() for x in tensors]) // max(1, num_rows)


def _take_results(results: Results, targets: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
    for target, result in zip(targets, results, strict=False):
        if result is not target:
            target.copy_(result)
    for total, result in zip(sums, results[len(targets) :], strict=True):
        add_rows_(total, result)


def add_rows_(total: Tensor, x: Tensor) -> None:
    """Adds the sum of the rows of ``x`` [..., n], or ``x`` [n] itself, to ``total`` [n]."""
    total += x if x.dim() == 1 else x.flatten(0, -2).sum(dim=0)
