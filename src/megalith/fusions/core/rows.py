"""Tensors as rows: leading dimensions flattened, columns contiguous; and what an operation on them computes in."""

from collections.abc import Sequence
from typing import Any, TypeVarTuple

import torch
from torch import Tensor

__all__ = [
    "as_rows",
    "contiguous_columns",
    "fresh_like",
    "in_shape",
    "not_a_view",
    "rows_per_sum",
    "rows_together",
    "wide",
]

Operands = TypeVarTuple("Operands")
_PROGRAMS = 792  # six for each multiprocessor of an H100


def as_rows(x: Tensor) -> Tensor:
    """``x`` [..., F] as [T, F], also for F = 0, where reshape(-1, 0) could not know T; a view if it can be one."""
    return x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def fresh_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialized memory in the shape of ``x``, contiguous whatever ``x`` is, in its dtype or another.

    ``x.new_empty(x.shape)`` does the same and takes longer, which small operations feel: it parses the shape.
    """
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def rows_together(*operands: *Operands) -> tuple[*Operands]:
    """``operands`` [..., F], or None, as they are if all are contiguous, else as rows [T, F].

    A contiguous tensor computes the same either way, and a view would cost autograd more than a small operation does.
    """
    given: Any = operands
    for x in given:
        if x is not None and not x.is_contiguous():
            given = tuple(None if x is None else as_rows(x) for x in given)
            break
    rows: tuple[*Operands] = given
    return rows


def contiguous_columns(x: Tensor) -> Tensor:
    """``x`` with contiguous columns, copied only if it must be: an expanded gradient has stride 0."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def wide(dtype: torch.dtype) -> torch.dtype:
    """What an operation on ``dtype`` computes in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def in_shape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """``x``, which nobody else holds, under another shape.

    To autograd it is no view: FSDP2 warns of a module that returns one, because writing into it would drop a hook.
    """
    if not torch.compiler.is_compiling() and x.shape == shape and not x._is_view():
        return x
    if not torch.is_grad_enabled():
        return x.view(shape)
    y: Tensor = torch.ops.aten._unsafe_view.default(x, list(shape))
    return y


def not_a_view(x: Tensor) -> Tensor:
    """``x``, which nobody else holds, as ``in_shape`` gives it where a gradient is recorded: for results of a Function,
    inside of which none is."""
    if torch.compiler.is_compiling() or not x._is_view():
        return x
    y: Tensor = torch.ops.aten._unsafe_view.default(x, list(x.shape))
    return y


def rows_per_sum(num_rows: int, num_tiles: int) -> int:
    """How many of ``num_rows`` rows a program adds up, each of ``num_tiles`` tiles of columns, for a sum over all rows.

    As many as leave ``_PROGRAMS`` programs; 128 at most, where writing the partial sums costs 1/64 of reading a 16-bit
    row.
    """
    return max(1, min(128, num_rows * num_tiles // _PROGRAMS))
