"""The norms on a CPU, in blocks of rows that stay in its caches; what LayerNorm does to a row is torch's own operator.

That operator makes one pass, and beside a float32 gain it keeps float32 statistics of 16-bit rows, but it adds up their
dw and db in 16 bits: for these it gets blocks in float32.
"""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from megalith.fusions.formulas.norm import (
    dropped,
    float_gain,
    gradients_of_norm,
    operator,
    outputs_of_norm,
    statistics,
    summed,
)
from megalith.fusions.formulas.rows import wide
from megalith.fusions.paths.blocks import BLOCK_ELEMENTS, by_blocks

__all__ = ["op"]

Item = TypeVar("Item")


def _forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    input_bias: Tensor | None,
    key: Tensor | None,
    tokens: Tensor | None,
    site: int,
    p: float,
    eps: float,
    normalization: str,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gain = float_gain(x, weight, zero_centered)
    if normalization == "LayerNorm":
        h = None if residual is None else _sum(x, residual, input_bias, key, tokens, site, p)
        rows = _for_torch(x if h is None else h, x.dtype)
        y, mean, rstd = torch.native_layer_norm(
            rows, gain.shape, gain, None if bias is None else bias.to(gain.dtype), eps
        )
        return y.to(x.dtype), x.new_empty(0) if h is None else h, mean, rstd
    y, stored, mean, rstd = outputs_of_norm(
        x, residual, weight, bias, input_bias, key, tokens, site, p, eps, normalization, zero_centered
    )

    def formula(x: Tensor, residual: Tensor | None, tokens: Tensor | None) -> tuple[Tensor, ...]:
        h = x if residual is None else summed(x, residual, input_bias, key, tokens, site, p).to(residual.dtype)
        rows = h.to(gain.dtype)
        _, rstd = statistics(rows, eps, normalization)
        return (rows * rstd * gain, rstd, *([] if residual is None else [h]))

    by_blocks(formula, (x, residual, _ids(key, tokens, x)), (y, rstd) if residual is None else (y, rstd, stored))
    return y, stored, mean, rstd


def _sum(
    x: Tensor,
    residual: Tensor,
    input_bias: Tensor | None,
    key: Tensor | None,
    tokens: Tensor | None,
    site: int,
    p: float,
) -> Tensor:
    """h of rows, in the dtype of ``residual``."""
    if key is None and input_bias is None:
        return (x + residual).to(residual.dtype)
    h = residual.new_empty(residual.shape)
    by_blocks(
        lambda x, residual, tokens: (summed(x, residual, input_bias, key, tokens, site, p),),
        (x, residual, _ids(key, tokens, x)),
        (h,),
    )
    return h


def _backward(
    dy: Tensor | None,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    key: Tensor | None,
    tokens: Tensor | None,
    site: int,
    p: float,
    zero_centered: bool,
    mean: Tensor,
    rstd: Tensor,
    x_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    input_bias_dtype: torch.dtype | None,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    gain = float_gain(h, weight, zero_centered)
    dy = torch.zeros_like(h, dtype=x_dtype) if dy is None else dy
    dh = None if dh is None or dh.numel() == 0 else dh  # without a residual there is none
    rows, vectors = needs[:2], needs[2:]
    whole = mean.numel() > 0 and key is None and rows == [True, False] and not vectors[2] and x_dtype == h.dtype
    asked = [rows[0] and not whole, *needs[1:]]
    gradients = gradients_of_norm(
        dy, dh, h, weight, key, tokens, site, p, zero_centered, mean, rstd, x_dtype, bias_dtype, input_bias_dtype, asked
    )
    if whole:
        dx, dw, db = _layer_norm_backward(dy, dh, h, gain, mean, rstd)
        gradients = dx, *gradients[1:]
        sums = _wanted((dw, db), vectors[:2])
    else:
        sums = [torch.zeros_like(gain) for _ in _wanted(vectors, vectors)]

        def formula(
            dy: Tensor, dh: Tensor | None, h: Tensor, mean: Tensor | None, rstd: Tensor, tokens: Tensor | None
        ) -> tuple[Tensor, ...]:
            total, dw, db = _norm_back(dy.to(gain.dtype), h.to(gain.dtype), gain, mean, rstd)
            total = total if dh is None else total.add_(dh)
            dx = dropped(total, key, tokens, site, p)
            dinput_bias = dx.sum(dim=0) if vectors[2] else dx
            return *_wanted((dx, total), rows), *_wanted((dw, db, dinput_bias), vectors)

        given = dy, dh, h, mean if mean.numel() else None, rstd, _ids(key, tokens, h)
        by_blocks(formula, given, _wanted(gradients[:2], rows), sums)
    for gradient, total in zip(_wanted(gradients[2:], vectors), sums, strict=True):
        gradient.copy_(total)
    return gradients


def _layer_norm_backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, gain: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dx in the dtype of ``h``, dgain and dbias of all rows, by as few passes as torch's operator takes."""
    if h.dtype == gain.dtype:
        dx, dgain, dbias = _layer_norm_back(dy, h, gain, mean, rstd, [True, True, True])
        return dx if dh is None else dx.add_(dh), dgain, dbias
    dgain, dbias = torch.zeros_like(gain), torch.zeros_like(gain)
    if dh is None:
        rows = _for_torch(dy, h.dtype), _for_torch(h, h.dtype)
        dx = _layer_norm_back(*rows, gain, mean, rstd, [True, False, False])[0].to(h.dtype)
    else:
        dx = h.new_empty(h.shape)
    # one memory for the float32 rows of all blocks: fresh pages for each would cost more than the sums
    num_rows = max(1, BLOCK_ELEMENTS // max(1, 2 * h.shape[1:].numel()))
    memory = h.new_empty((2, num_rows, *h.shape[1:]), dtype=gain.dtype)
    for block in (slice(start, start + num_rows) for start in range(0, len(h), num_rows)):
        wide_dy, wide_h = (wide[: len(x[block])].copy_(x[block]) for wide, x in zip(memory, (dy, h), strict=True))
        needs = [dh is not None, True, True]
        total, *parts = _layer_norm_back(wide_dy, wide_h, gain, mean[block], rstd[block], needs)
        if dh is not None:
            dx[block] = total.add_(dh[block])
        dgain += parts[0]
        dbias += parts[1]
    return dx, dgain, dbias


def _norm_back(dy: Tensor, h: Tensor, gain: Tensor, mean: Tensor | None, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dh, dgain [H] and dbias [H] of rows in float32 or wider; of RMSNorm without a ``mean``: its dbias is unused."""
    if mean is not None:
        return _layer_norm_back(dy, h, gain, mean, rstd, [True, True, True])
    h_hat = h * rstd
    by_h_hat = dy * h_hat
    dgain = by_h_hat.flatten(0, -2).sum(dim=0)
    dh = dy * gain - h_hat * (by_h_hat * gain).mean(dim=-1, keepdim=True)
    return dh * rstd, dgain, dgain


def _layer_norm_back(
    dy: Tensor, h: Tensor, gain: Tensor, mean: Tensor, rstd: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    # what stands for the bias gives its shape to dbias
    dh, dgain, dbias = torch.ops.aten.native_layer_norm_backward(dy, h, gain.shape, mean, rstd, gain, gain, needs)
    return dh, dgain, dbias


def _for_torch(x: Tensor, result: torch.dtype) -> Tensor:
    """``x`` as torch's LayerNorm takes it beside a float32 gain: on a CPU also of 16 bits, if the result has them."""
    return x if x.device.type == "cpu" and x.dtype == result else x.to(wide(x.dtype))


def _ids(key: Tensor | None, tokens: Tensor | None, x: Tensor) -> Tensor | None:
    return torch.arange(len(x), device=x.device) if key is not None and tokens is None else tokens


def _wanted(values: Sequence[Item], needs: Sequence[bool]) -> list[Item]:
    return [value for value, needed in zip(values, needs, strict=True) if needed]


op = operator("norm_blocked", _forward, backward=_backward, opaque=True)
