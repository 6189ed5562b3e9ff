"""Norms on a CPU: formulas over blocks of rows, or compiled; LayerNorm uses torch's own operator for each row.

That operator makes one pass. Given a float32 gain, it keeps float32 statistics of 16-bit rows, but it accumulates their
dw and db in 16 bits; for these it gets blocks in float32.
"""

# ruff: noqa: UP044  a starred annotation would iterate over the NamedTuple class, which raises TypeError

from collections.abc import Sequence
from typing import TypeVar, Unpack

import torch
from torch import Tensor

from megalith.fusions.core.dropout_mask import Mask, rows_of_mask
from megalith.fusions.core.row_wise import Runner, register_row_wise
from megalith.fusions.core.rows import fresh_like, wide
from megalith.fusions.norm.formulas import (
    OPERATOR,
    OPERATOR_OF_SUM,
    Kept,
    Norming,
    Options,
    OptionsOfBack,
    dropped,
    float_gain,
    statistics,
    summed,
)

__all__ = ["blocked", "blocked_of_sum", "compiled", "compiled_of_sum"]

Item = TypeVar("Item")


def _forward(
    run: Runner,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    input_bias: Tensor | None,
    *options: Unpack[Options],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mask, eps, normalization, zero_centered = Norming.of(*options)
    acc = wide(x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype))
    gain = float_gain(x, weight, zero_centered, acc)
    if normalization == "LayerNorm":
        h = None if residual is None else _sum(run, x, residual, input_bias, mask)
        rows = _for_torch(x if h is None else h, x.dtype, acc)
        y, mean, rstd = torch.native_layer_norm(
            rows, gain.shape, gain, None if bias is None else bias.to(gain.dtype), eps
        )
        return y.to(x.dtype), x.new_empty(0) if h is None else h, mean, rstd
    y, stored, mean, rstd = OPERATOR.outputs(x, residual, weight, bias, input_bias, *options)
    mask, *mask_rows = rows_of_mask(mask, x)

    def formula(x: Tensor, residual: Tensor | None, tokens: Tensor | None, sites: Tensor | None) -> tuple[Tensor, ...]:
        its_mask = mask.at(tokens, sites)
        h = x if residual is None else summed(x, residual, input_bias, its_mask).to(residual.dtype)
        rows = h.to(gain.dtype)
        _, rstd = statistics(rows, eps, normalization)
        return (rows * rstd * gain, rstd, *([] if residual is None else [h]))

    run.by_blocks(formula, (x, residual, *mask_rows), (y, rstd) if residual is None else (y, rstd, stored))
    return y, stored, mean, rstd


def _sum(run: Runner, x: Tensor, residual: Tensor, input_bias: Tensor | None, mask: Mask) -> Tensor:
    """h of all rows, in the dtype of ``residual``."""
    if mask.key is None and input_bias is None:
        return (x + residual).to(residual.dtype)
    h = fresh_like(residual)
    mask, *mask_rows = rows_of_mask(mask, x)

    def formula(x: Tensor, residual: Tensor, tokens: Tensor | None, sites: Tensor | None) -> tuple[Tensor]:
        return (summed(x, residual, input_bias, mask.at(tokens, sites)),)

    run.by_blocks(formula, (x, residual, *mask_rows), (h,))
    return h


def _backward(
    run: Runner, dy: Tensor | None, dh: Tensor | None, h: Tensor, weight: Tensor | None, *options: Unpack[OptionsOfBack]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    kept = Kept.of(*options)
    mask, mean, rstd, needs = kept.mask, kept.mean, kept.rstd, kept.needs
    gain = float_gain(h, weight, kept.zero_centered, rstd.dtype)
    dy = torch.zeros_like(h, dtype=kept.x_dtype) if dy is None else dy
    dh = None if dh is None or dh.numel() == 0 else dh  # empty without a residual
    rows, vectors = needs[:2], needs[2:]
    same_dx = mask.key is None and kept.x_dtype == h.dtype  # matches what torch's operator writes
    whole = mean.numel() > 0 and same_dx and rows == [True, False] and not vectors[2]
    asked = [rows[0] and not whole, *needs[1:]]
    dx, dresidual, dw, db, dinput_bias = OPERATOR.gradients(dy, dh, h, weight, *options[:-1], asked)
    if whole:
        dx, *parts = _layer_norm_backward(run, dy, dh, h, gain, mean, rstd)
        sums = _wanted(parts, vectors[:2])
    else:
        sums = [torch.zeros_like(gain) for _ in _wanted(vectors, vectors)]
        mask, *mask_rows = rows_of_mask(mask, h)

        def formula(
            dy: Tensor,
            dh: Tensor | None,
            h: Tensor,
            mean: Tensor | None,
            rstd: Tensor,
            tokens: Tensor | None,
            sites: Tensor | None,
        ) -> tuple[Tensor, ...]:
            total, dw, db = _norm_back(dy.to(gain.dtype), h.to(gain.dtype), gain, mean, rstd)
            total = total if dh is None else total.add_(dh)
            dx = dropped(total, mask.at(tokens, sites))
            return *_wanted((dx, total), rows), *_wanted((dw, db, dx), vectors)

        given = dy, dh, h, mean if mean.numel() else None, rstd, *mask_rows
        run.by_blocks(formula, given, _wanted((dx, dresidual), rows), sums)
    for gradient, total in zip(_wanted((dw, db, dinput_bias), vectors), sums, strict=True):
        gradient.copy_(total)
    return dx, dresidual, dw, db, dinput_bias


def _layer_norm_backward(
    run: Runner, dy: Tensor, dh: Tensor | None, h: Tensor, gain: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dx in the dtype of ``h``, dgain and dbias over all rows, in as few passes as torch's operator takes."""
    if h.dtype == gain.dtype:
        dx, dgain, dbias = _layer_norm_back(dy, h, gain, mean, rstd, [True, True, True])
        return dx if dh is None else dx.add_(dh), dgain, dbias
    dgain, dbias = torch.zeros_like(gain), torch.zeros_like(gain)
    if dh is None:
        rows = _for_torch(dy, h.dtype, gain.dtype), _for_torch(h, h.dtype, gain.dtype)
        dx = _layer_norm_back(*rows, gain, mean, rstd, [True, False, False])[0].to(h.dtype)
    else:
        dx = fresh_like(h)

    def formula(
        dy: Tensor, h: Tensor, mean: Tensor, rstd: Tensor, dh: Tensor | None, out: list[Tensor | None]
    ) -> tuple[Tensor, ...]:
        total, *parts = _layer_norm_back(dy, h, gain, mean, rstd, [dh is not None, True, True])
        return (*parts,) if dh is None else (total.add_(dh), *parts)

    outputs = [] if dh is None else [dx]
    run.widened_by_blocks(formula, (dy, h, mean, rstd, dh), outputs, (dgain, dbias), acc=gain.dtype)
    return dx, dgain, dbias


def _norm_back(dy: Tensor, h: Tensor, gain: Tensor, mean: Tensor | None, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dh, and dgain and dbias, summed [H] or as one term per row [..., H]; all in float32 or wider.

    RMSNorm if ``mean`` is None; its dbias is unused.
    """
    if mean is not None:
        return _layer_norm_back(dy, h, gain, mean, rstd, [True, True, True])
    h_hat = h * rstd
    by_h_hat = dy * h_hat
    dh = dy * gain - h_hat * (by_h_hat * gain).mean(dim=-1, keepdim=True)
    return dh * rstd, by_h_hat, by_h_hat


def _layer_norm_back(
    dy: Tensor, h: Tensor, gain: Tensor, mean: Tensor, rstd: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    # the argument in place of the bias only determines the shape of dbias
    dh, dgain, dbias = torch.ops.aten.native_layer_norm_backward(dy, h, gain.shape, mean, rstd, gain, gain, needs)
    return dh, dgain, dbias


def _for_torch(x: Tensor, result: torch.dtype, acc: torch.dtype) -> Tensor:
    """``x`` for torch's LayerNorm with a float32 gain: widened, except on a CPU if the result has the same dtype."""
    return x if x.device.type == "cpu" and x.dtype == result else x.to(acc)


def _wanted(values: Sequence[Item], needs: Sequence[bool]) -> list[Item]:
    return [value for value, needed in zip(values, needs, strict=True) if needed]


blocked, compiled = register_row_wise(OPERATOR, "norm", _forward, _backward)
blocked_of_sum, compiled_of_sum = register_row_wise(OPERATOR_OF_SUM, "add_norm", _forward, _backward)
