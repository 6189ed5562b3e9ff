"""Runs a formula over rows through torch.compile: one loop over memory, where ``blocks`` makes many passes in cache.

Each sum over rows is another pass over its terms, with torch's own sum.

The formulas are those of the blocked path. Each is compiled once per combination of options, dtypes and columns, for
any number of rows. The enclosing operator saves the same tensors, and the compiled loop writes results in place.
"""

import functools
from collections.abc import Callable, Sequence
from types import CodeType
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from megalith.fusions.core.blocks import Results, add_rows_, blocks, extent
from megalith.torch_compat.compiler import compile_apart

__all__ = ["compiled_by_blocks", "compiled_whole"]

P = ParamSpec("P")
R = TypeVar("R")

# blocks per compiled call: a call costs a tenth of a millisecond, which is negligible for a million elements, and what
# formulas with sums or a mask write besides their outputs stays small: 4 MiB per thread and float32 term of a sum
_AT_ONCE = 8


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
    compute = _compiled(formula.__code__)
    outputs = _apart(outputs)
    with torch.no_grad():
        for block in blocks(num_rows, widest, at_once=_AT_ONCE):
            given = [None if x is None else _any_length(x[block]) for x in rows]
            written = [_any_length(output[block]) for output in outputs]
            _add(sums, compute(formula, given, written, acc))


def _add(sums: Sequence[Tensor], addends: Sequence[Tensor]) -> None:
    # a function, so that the memory of these addends is free before the next block's are computed
    for total, addend in zip(sums, addends, strict=True):
        add_rows_(total, addend)


def compiled_whole(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles ``function`` of whole tensors for any number of rows; vectors are shared by all rows."""

    @functools.cache
    def build() -> Callable[..., R]:
        return compile_apart(function)

    def run(*inputs: P.args, **_: P.kwargs) -> R:
        given = [_any_length(x) if isinstance(x, Tensor) and x.dim() > 1 else x for x in inputs]
        with torch.no_grad():
            return build()(*given)

    return run


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


@functools.cache
def _compiled(_: CodeType) -> Callable[..., list[Tensor]]:
    """Returns a compiler private to one formula's code, so that no call checks the guards of other formulas."""
    return compile_apart(_compute)


def _any_length(x: Tensor) -> Tensor:
    """Returns ``x`` with all dimensions but the last, if there are several, marked as dynamic for the compiler.

    They count rows, or of heads [S, B, A, D] tokens, sequences and heads; a size of 1 is compiled by itself.
    """
    # another tensor object: a mark on the caller's would reach the caller's own torch.compile, and a view would be
    # traced together with the tensor that it is a view of, which takes longer
    x = x.detach()
    for dim in range(max(1, x.dim() - 1)):
        torch._dynamo.maybe_mark_dynamic(x, dim)
    return x


def _apart(written: Sequence[Tensor]) -> list[Tensor]:
    """Gives tensors that share a storage separate ones: the compiler would write the whole storage for each of them."""
    storages: set[int] = set()
    found: list[Tensor] = []
    for x in written:
        storage = x.untyped_storage().data_ptr()
        found.append(_alone(x) if storage in storages else x)
        storages.add(storage)
    return found


def _alone(x: Tensor) -> Tensor:
    return from_dlpack(x.detach())  # the same memory in a separate storage object
