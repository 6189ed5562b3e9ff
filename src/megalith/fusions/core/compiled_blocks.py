"""Runs a formula over rows through torch.compile: one loop over memory, where ``blocks`` makes many passes in cache.

Each sum over rows is another pass over its terms, with torch's own sum.

The formulas are those of the blocked path. Each is compiled once per combination of options, dtypes and columns, for
any number of rows. The enclosing operator saves the same tensors, and the compiled loop writes results in place.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megalith.fusions.core.blocks import Results, add_rows_, blocks, extent
from megalith.fusions.core.compiled_formulas import CompiledFormula

__all__ = ["compiled_by_blocks"]

# blocks per compiled call: a call costs as much as some 100,000 elements, and what formulas with sums or a mask write
# besides their outputs stays small: 16 MiB per thread and float32 term of a sum
_AT_ONCE = 32


def compiled_by_blocks(
    formula: Callable[..., Results],
    rows: Sequence[Tensor | None],
    outputs: Sequence[Tensor],
    sums: Sequence[Tensor] = (),
    *,
    acc: torch.dtype | None = None,
) -> None:
    """``blocks.by_blocks``, compiled; given ``acc``, ``blocks.widened_by_blocks``."""
    num_rows, widest = extent((*outputs, *rows))
    for block in blocks(num_rows, widest, at_once=_AT_ONCE):
        if block.stop - block.start == num_rows:
            _add(sums, _compiled(formula, [*rows], [*outputs], acc))
        else:
            given = [None if x is None else x[block] for x in rows]
            _add(sums, _compiled(formula, given, [output[block] for output in outputs], acc))


def _add(sums: Sequence[Tensor], addends: Sequence[Tensor]) -> None:
    # a function, so that the memory of these addends is free before the next block's are computed
    for total, addend in zip(sums, addends, strict=True):
        add_rows_(total, addend)


def _compute(
    formula: Callable[..., Results],
    rows: Sequence[Tensor | None],
    outputs: Sequence[Tensor],
    acc: torch.dtype | None,
) -> list[Tensor]:
    """Fills ``outputs`` and returns the contributions to sums over rows.

    Those sums are not compiled: the compiler's loop over rows inside a loop over columns would take twice as long as
    the formula.
    """
    if acc is None:
        results = formula(*rows)
    else:
        wide = [x.to(acc) if x is not None and x.is_floating_point() else x for x in rows]
        results = formula(*wide, [None] * len(outputs))
    for target, result in zip(outputs, results, strict=False):
        target.copy_(result)
    return [_where_written(addend, results, outputs) for addend in results[len(outputs) :]]


def _where_written(addend: Tensor, results: Results, outputs: Sequence[Tensor]) -> Tensor:
    """The one of ``outputs`` that holds ``addend`` unrounded, else ``addend`` itself."""
    written = zip(results, outputs, strict=False)
    return next((y for x, y in written if x is addend and x.dtype == y.dtype), addend)


_compiled = CompiledFormula(_compute)
