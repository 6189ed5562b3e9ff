"""Implements the formulas stated in ``bias_dropout``; T tokens, H hidden size."""

# ruff: noqa: UP044  a starred annotation would iterate over the NamedTuple class, which raises TypeError

from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from megalith.fusions.core.dropout_mask import Mask, keep, rows_of_mask
from megalith.fusions.core.registration import Operator
from megalith.fusions.core.row_wise import Runner, register_row_wise
from megalith.fusions.core.rows import as_rows, fresh_like, in_shape, wide

__all__ = ["OPERATOR", "Kept", "blocked", "compiled", "gradients", "outputs", "reference"]


def reference(x: Tensor, bias: Tensor | None, residual: Tensor, *mask: Unpack[Mask]) -> Tensor:
    """y [..., H] for ``x`` and ``residual`` [..., H] and the operands of a ``Mask``."""
    if _is_plain_sum(x, bias, residual, *mask):
        return x + residual
    acc, rows = wide(torch.promote_types(x.dtype, residual.dtype)), as_rows(x)
    y = _add_(rows.to(acc, copy=True), bias, as_rows(residual), Mask(*mask)).to(residual.dtype)
    return in_shape(y, residual.shape)


def _is_plain_sum(x: Tensor, bias: Tensor | None, residual: Tensor, key: Tensor | None, *_: object) -> bool:
    """Whether y is a single addition, which torch also rounds once."""
    return key is None and bias is None and torch.promote_types(x.dtype, residual.dtype) == residual.dtype


def _add_(y: Tensor, bias: Tensor | None, residual: Tensor, mask: Mask) -> Tensor:
    """Adds the bias and the residual to ``y``, a copy of x in float32 or wider, and applies dropout, in place."""
    y = y if bias is None else y.add_(bias.to(y.dtype))
    return _drop_(y, mask).add_(residual.to(y.dtype))


def _drop_(y: Tensor, mask: Mask) -> Tensor:
    if mask.key is None:
        return y
    # a product with a bool, for which autograd saves one byte per element
    kept = keep(mask.key, mask.tokens, mask.site, mask.p, y.shape[0], y.shape[1], mask.feature_offset)
    return y.mul_(kept).mul_(1.0 / (1.0 - mask.p))


class Kept(NamedTuple):
    """What backward gets besides dy: the mask's operands, the dtypes of its results, and which results are needed."""

    key: Tensor | None
    tokens: Tensor | None
    site: int
    p: float
    feature_offset: int
    x_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    needs: list[bool]

    @property
    def mask(self) -> Mask:
        return Mask(*self[:5])


def outputs(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    key: Tensor | None,
    tokens: Tensor | None,
    site: int,
    p: float,
    feature_offset: int,
) -> Tensor:
    """Allocates y [T, H]."""
    return fresh_like(residual)


def gradients(dy: Tensor, *options: Unpack[Kept]) -> tuple[Tensor, Tensor]:
    """Allocates dx and dbias, empty if ``needs`` is False for them."""
    kept = Kept(*options)
    dx = fresh_like(dy, kept.x_dtype) if kept.needs[0] else dy.new_empty(0, dtype=kept.x_dtype)
    dbias = dy.new_empty(dy.shape[1] if kept.needs[1] else 0, dtype=kept.bias_dtype or kept.x_dtype)
    return dx, dbias


def _saves(
    _: tuple[Tensor, ...], x: Tensor, bias: Tensor | None, residual: Tensor, *mask: Unpack[Mask]
) -> tuple[object, ...]:
    return *mask, x.dtype, None if bias is None else bias.dtype


def _passes(x: Tensor, bias: Tensor | None, residual: Tensor, key: Tensor | None, *_: object) -> tuple[str, ...]:
    return ("residual", "x") if key is None and x.dtype == residual.dtype else ("residual",)


OPERATOR = Operator(outputs, gradients, of=("x", "bias"), saves=_saves, passes=_passes, rows=("x", "residual", "dy"))


def _forward(run: Runner, x: Tensor, bias: Tensor | None, residual: Tensor, *options: Unpack[Mask]) -> Tensor:
    y = OPERATOR.outputs(x, bias, residual, *options)
    if _is_plain_sum(x, bias, residual, *options):
        return torch.add(x, residual, out=y)
    acc = wide(torch.promote_types(x.dtype, y.dtype))
    mask, *mask_rows = rows_of_mask(Mask(*options), x)

    def formula(
        x: Tensor, residual: Tensor, tokens: Tensor | None, sites: Tensor | None, out: list[Tensor | None]
    ) -> tuple[Tensor]:
        if out[0] is None:
            total = x.clone() if bias is None else x + bias.to(acc)
        else:
            total = out[0].copy_(x) if bias is None else torch.add(x, bias.to(acc), out=out[0])
        return (_drop_(total, mask.at(tokens, sites)).add_(residual),)

    run.widened_by_blocks(formula, (x, residual, *mask_rows), (y,), acc=acc)
    return y


def _backward(run: Runner, dy: Tensor, *options: Unpack[Kept]) -> tuple[Tensor, Tensor]:
    (dx, dbias), kept = gradients(dy, *options), Kept(*options)
    mask, needs, acc = kept.mask, kept.needs, wide(torch.promote_types(kept.x_dtype, dy.dtype))
    if mask.key is None and needs == [False, True] and dy.dtype == acc:
        return dx, dy.sum(dim=0, dtype=acc).to(dbias.dtype)
    total = dbias.zero_().to(acc)
    mask, *mask_rows = rows_of_mask(mask, dy)

    def formula(dy: Tensor, tokens: Tensor | None, sites: Tensor | None) -> tuple[Tensor, ...]:
        dx = _drop_(dy.to(acc, copy=mask.key is not None), mask.at(tokens, sites))
        return (*([dx] if needs[0] else []), *([dx] if needs[1] else []))

    outputs, sums = (dx,) if needs[0] else (), (total,) if needs[1] else ()
    run.by_blocks(formula, (dy, *mask_rows), outputs, sums)
    return dx, total.to(dbias.dtype)


blocked, compiled = register_row_wise(OPERATOR, "bias_dropout_add", _forward, _backward)
