"""Operators that launch the kernels of norm.py: LayerNorm and RMSNorm, alone or after a residual sum.

Rows are [T, H], or [M, N, H] if two strides are needed to address them.
"""

# ruff: noqa: UP044  a starred annotation would iterate over the NamedTuple class, which raises TypeError

from typing import Unpack

import torch
from torch import Tensor

from megalith.fusions.core.devices import has_large_memory
from megalith.fusions.core.grids import cdiv, next_power_of_2
from megalith.fusions.core.registration import wrap_triton
from megalith.fusions.core.rows import contiguous_columns
from megalith.fusions.norm.formulas import (
    OPERATOR,
    OPERATOR_OF_SUM,
    PROGRAMS,
    WIDEST_WHOLE_ROW,
    Kept,
    Norming,
    Options,
    OptionsOfBack,
    rows_per_program,
)
from megalith.fusions.norm.kernels.norm import backward_kernel, coefficients_kernel, forward_kernel, wide_forward_kernel
from megalith.numerics.dropout import threshold

__all__ = ["op", "op_of_sum"]

_ELEMENTS = 2048  # untuned: minimum per program, in several rows if they are short
_OF_THREAD, _MOST_WARPS = 16, 16  # elements per thread, and the largest number of warps
_STAGES = 1  # pipeline stages of the loads of rows in backward; more would cost registers and shared memory
# from a sweep on an H100, two programs per multiprocessor: 12 % faster, 1 % with a residual's gradient
_LARGE_PROGRAMS, _LARGE_STAGES, _LARGE_TILE = 264, 3, 4096  # for tiles of up to 4096 elements: more would not fit
_WIDE_BLOCK = 4096  # untuned, like the next one
_WIDEST_SUMMED_ROW = 8192  # that a program can hold twice, in addition to the sums of dw and db


def _forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    input_bias: Tensor | None,
    *options: Unpack[Options],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mask, eps, _, zero_centered = Norming.of(*options)
    y, h, mean, rstd = OPERATOR.outputs(x, residual, weight, bias, input_bias, *options)
    if y.numel() == 0:
        return y, h, mean, rstd
    x, residual = _nested(x), None if residual is None else contiguous_columns(residual)
    T, (_, N, H) = rstd.numel(), x.shape
    tensors = (
        x, residual, _dense(input_bias), mask.key, _dense(mask.tokens), _dense(weight), _dense(bias),
        _given(h), y, _given(mean), rstd,
        x.stride(0), x.stride(1), 0 if residual is None else residual.stride(0), mask.site,
    )  # fmt: skip
    settings: dict[str, float] = {"EPS": eps, "ZERO_CENTERED": zero_centered} | _dropout(mask.p)
    if H > WIDEST_WHOLE_ROW:
        wrap_triton(wide_forward_kernel)[(T,)](*tensors, N, H, **settings, BLOCK=_WIDE_BLOCK, num_warps=8)
    else:
        tile = _tile(H, mask.key)
        wrap_triton(forward_kernel)[(cdiv(T, tile["ROWS"]),)](*tensors, T, N, H, **settings, **tile)
    return y, h, mean, rstd


def _backward(
    dy: Tensor | None, dh: Tensor | None, h: Tensor, weight: Tensor | None, *options: Unpack[OptionsOfBack]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    kept = Kept.of(*options)
    mask, zero_centered, mean, rstd = kept.mask, kept.zero_centered, kept.mean, kept.rstd
    gradients = OPERATOR.gradients(dy, dh, h, weight, *options)
    if h.numel() == 0:
        for gradient in gradients:
            gradient.zero_()
        return gradients
    dx, dresidual, *vectors = gradients
    T, H, whole = rstd.numel(), h.shape[-1], h.shape[-1] <= _WIDEST_SUMMED_ROW
    dy = _nested(torch.zeros_like(h, dtype=kept.x_dtype) if dy is None else dy)
    dh, h = None if dh is None else _given(contiguous_columns(dh)), _nested(h)
    rows = dy, h, _dense(weight), _given(mean), rstd
    strides = dy.stride(0), dy.stride(1), h.stride(0), h.stride(1)
    along = across = None
    if not whole:
        along, across = torch.empty_like(rstd), _given(torch.empty_like(mean))
        wrap_triton(coefficients_kernel)[(T,)](
            *rows, along, across, *strides, h.shape[1], H, ZERO_CENTERED=zero_centered, BLOCK=_WIDE_BLOCK, num_warps=8
        )
    tile = _tile(H if whole else _ELEMENTS, mask.key)
    num_tiles = cdiv(H, tile["BLOCK"])
    is_large = tile["ROWS"] * tile["BLOCK"] <= _LARGE_TILE and has_large_memory(h)
    num_programs, stages = (_LARGE_PROGRAMS, _LARGE_STAGES) if is_large else (PROGRAMS, _STAGES)
    num_rows = rows_per_program(T, tile["ROWS"], num_tiles, num_programs)
    groups = cdiv(T, num_rows)
    sums = [h.new_empty(groups, H, dtype=torch.float32) if needed else None for needed in kept.needs[2:]]
    wrap_triton(backward_kernel)[(groups, num_tiles)](
        *rows, dh, mask.key, _dense(mask.tokens), along, across, _given(dx), _given(dresidual), *sums,
        *strides, 0 if dh is None else dh.stride(0), mask.site, T, h.shape[1], H, num_rows,
        ZERO_CENTERED=zero_centered, **_dropout(mask.p), **tile,
        STAGES=stages,
    )  # fmt: skip
    # a float32 sum is itself the gradient: copying it into the allocated one would cost another launch per vector
    dw, db, dinput_bias = (
        gradient if parts is None else parts.sum(dim=0).to(gradient.dtype)
        for gradient, parts in zip(vectors, sums, strict=True)
    )
    return dx, dresidual, dw, db, dinput_bias


def _tile(H: int, key: Tensor | None) -> dict[str, int]:
    """Rows per step, columns per row, and warps; one row with dropout, whose mask is generated row by row."""
    block = max(4, int(next_power_of_2(H)))  # an int also where torch.compile traces symbolic sizes
    rows = 1 if key is not None else max(1, _ELEMENTS // block)
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(_MOST_WARPS, max(1, rows * block // (32 * _OF_THREAD)))}


def _dropout(p: float) -> dict[str, float]:
    return {"THRESHOLD": threshold(p), "SCALE": 1.0 / (1.0 - p)}


def _nested(x: Tensor) -> Tensor:
    x = contiguous_columns(x)
    return x if x.dim() == 3 else x[:, None]


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _given(x: Tensor) -> Tensor | None:
    """Returns ``x``, or None for the empty tensor that stands for None."""
    return x if x.numel() else None


op = OPERATOR.register("norm", _forward, _backward)
op_of_sum = OPERATOR_OF_SUM.register("add_norm", _forward, _backward)
