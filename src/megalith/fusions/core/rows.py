"""Tensors as rows: leading dimensions flattened, columns contiguous; and the dtype in which operations compute."""

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
_PROGRAMS = 792  # six per multiprocessor of an H100


def as_rows(x: Tensor) -> Tensor:
    """``x`` [..., F] as [T, F], a view if possible; also for F = 0, where reshape(-1, 0) could not infer T."""
    return x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def fresh_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialized memory in the shape of ``x``, always contiguous, in its dtype or the given one.

    ``x.new_empty(x.shape)`` does the same but parses the shape, which is slow enough to matter for small operations.
    """
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def rows_together(*operands: *Operands) -> tuple[*Operands]:
    """Returns ``operands`` [..., F] or None unchanged if all are contiguous, else as rows [T, F].

    The results are the same for contiguous tensors, and a view would cost autograd more than a small operation takes.
    """
    given: Any = operands
    for x in given:
        if x is not None and not x.is_contiguous():
            given = tuple(None if x is None else as_rows(x) for x in given)
            break
    rows: tuple[*Operands] = given
    return rows


def contiguous_columns(x: Tensor) -> Tensor:
    """``x`` with contiguous columns, copied only if necessary; expanded gradients, for example, have stride 0."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that an operation on ``dtype`` computes in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def in_shape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """``x``, which nobody else holds, in another shape.

    Autograd does not treat it as a view: FSDP2 warns about modules that return views, because writing into one would
    drop a hook.
    """
    if not torch.compiler.is_compiling() and x.shape == shape and not x._is_view():
        return x
    if not torch.is_grad_enabled():
        return x.view(shape)
    y: Tensor = torch.ops.aten._unsafe_view.default(x, list(shape))
    return y


def not_a_view(x: Tensor) -> Tensor:
    """``x``, which nobody else holds, as a tensor that autograd does not treat as a view.

    For results of a Function, inside of which gradients are not recorded and ``in_shape`` would return a view.
    """
    if torch.compiler.is_compiling() or not x._is_view():
        return x
    y: Tensor = torch.ops.aten._unsafe_view.default(x, list(x.shape))
    return y


def rows_per_sum(num_rows: int, num_tiles: int) -> int:
    """The number of rows that each program sums up, for a sum over ``num_rows`` rows of ``num_tiles`` tiles each.

    As many as still leave ``_PROGRAMS`` programs, and at most 128, where writing the partial sums costs 1/64 of reading
    16-bit rows.
    """
    return max(1, min(128, num_rows * num_tiles // _PROGRAMS))
