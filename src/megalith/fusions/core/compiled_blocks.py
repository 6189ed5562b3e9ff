"""Runs a formula over rows through torch.compile: one loop over memory where ``blocks`` makes many passes in a cache.

The formulas are those of the blocked path, each compiled once for its options, dtypes and columns, for any number of
rows. The operator around them keeps what it keeps, and the compiled loop writes results where they belong.
"""

import functools
from collections.abc import Callable, Sequence
from types import CodeType
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from megalith.fusions.core.blocks import Results, blocks, extent
from megalith.torch_compat import compile_apart

__all__ = ["compiled_by_blocks", "compiled_whole"]

P = ParamSpec("P")
R = TypeVar("R")

# blocks that are computed as one: a call into compiled code costs a tenth of a millisecond, which a million elements
# hide, and what a formula with sums or a mask holds in between stays small
_AT_ONCE = 8


def compiled_by_blocks(
    formula: Callable[..., Results],
    rows: Sequence[Tensor | None],
    outputs: Sequence[Tensor],
    sums: Sequence[Tensor] = (),
    *,
    acc: torch.dtype | None = None,
) -> None:
    """``blocks.by_blocks``, compiled; with ``acc`` it is ``blocks.widened_by_blocks``."""
    num_rows, widest = extent((*outputs, *rows))
    compute = _compiled(formula.__code__)
    outputs, sums = _apart(outputs), _apart(sums)
    with torch.no_grad():
        for block in blocks(num_rows, widest, at_once=_AT_ONCE):
            given = [None if x is None else _any_length(x[block]) for x in rows]
            compute(formula, given, [_any_length(output[block]) for output in outputs], sums, acc)


def compiled_whole(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` of whole tensors, compiled for any number of rows; a vector has none, all rows share it."""

    @functools.cache
    def build() -> Callable[..., R]:
        return compile_apart(function)

    def run(*inputs: P.args, **_: P.kwargs) -> R:
        given = [_any_length(x[:]) if isinstance(x, Tensor) and x.dim() > 1 else x for x in inputs]
        with torch.no_grad():
            return build()(*given)

    return run


def _compute(
    formula: Callable[..., Results],
    rows: Sequence[Tensor | None],
    outputs: Sequence[Tensor],
    sums: Sequence[Tensor],
    acc: torch.dtype | None,
) -> None:
    if acc is None:
        results = formula(*rows)
    else:
        wide = [x.to(acc) if x is not None and x.is_floating_point() else x for x in rows]
        results = formula(*wide, [None] * len(outputs))
    for target, result in zip(outputs, results, strict=False):
        target.copy_(result)
    for total, result in zip(sums, results[len(outputs) :], strict=True):
        total += result


@functools.cache
def _compiled(_: CodeType) -> Callable[..., None]:
    """A compiler of its own for the code of each formula, so that no call looks through what others have compiled."""
    return compile_apart(_compute)


def _any_length(x: Tensor) -> Tensor:
    """``x``, nobody else's view, to be compiled for any number of rows."""
    torch._dynamo.maybe_mark_dynamic(x, 0)
    return x


def _apart(written: Sequence[Tensor]) -> list[Tensor]:
    """``written``, where parts of one tensor do not look like that: the compiler would write all of it for each."""
    storages: set[int] = set()
    found: list[Tensor] = []
    for x in written:
        storage = x.untyped_storage().data_ptr()
        found.append(_alone(x) if storage in storages else x)
        storages.add(storage)
    return found


def _alone(x: Tensor) -> Tensor:
    return from_dlpack(x.detach())  # the same memory, under a storage of its own
