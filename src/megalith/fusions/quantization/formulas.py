"""Implements the formulas stated in ``quantize``; N matrices of R rows and H columns."""

import torch
from torch import Tensor

from megalith.fusions.core.blocks import blocks
from megalith.fusions.core.registration import register_without_gradient
from megalith.fusions.quantization.quantized import (
    FORMATS,
    LAYOUTS,
    SMALLEST_SCALE,
    SMALLEST_TENSOR_SCALE,
    Outputs,
    groups,
    outputs_of,
)

__all__ = ["blocked", "reference"]

_NAN = 0x7F  # in both 8-bit formats


def reference(x: Tensor, kind: str, dtype: torch.dtype, transpose: bool) -> Outputs:
    """The outputs described by ``outputs_of``, for ``x`` [N, R, H]."""
    layout, none = LAYOUTS[kind], x.new_empty(0, dtype=torch.uint8)
    amax_of_all = _amax((x if layout.of_all else none).float().flatten(), x.dtype)
    values, scale = _quantize_rows(x, kind, dtype, amax_of_all)
    values_t, scale_t = none, none
    if transpose and layout.symmetric:
        values_t = values.mT.contiguous()
    elif transpose:
        values_t, scale_t = _quantize_rows(x.mT, kind, dtype, amax_of_all)
    tensor_scale = _tensor_scale(amax_of_all) if kind == "nvfp4" else none.float()
    if kind == "block128":
        scale, scale_t = (one.mT.contiguous().mT if one.dim() > 1 else one for one in (scale, scale_t))
    return values, scale, tensor_scale, values_t, scale_t


def _quantize_rows(x: Tensor, kind: str, dtype: torch.dtype, amax_of_all: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes and scales of the rows of ``x`` [..., R, H]; ``amax_of_all`` is only read if the layout is ``of_all``."""
    layout, (R, H) = LAYOUTS[kind], x.shape[-2:]
    parts = groups(x.contiguous().float(), layout.columns)  # [..., R, H/columns, columns]
    amax = amax_of_all if kind == "tensor" else _amax(parts, x.dtype)  # [..., R, H/columns]
    if layout.tiled:
        amax = _amax(groups(amax.mT, 128), x.dtype).mT  # [..., R/128, H/128]
    scale, factor = _scales(amax, kind, dtype, amax_of_all)
    if layout.tiled:
        factor = factor.repeat_interleave(128, dim=-2)[..., :R, :]
    codes = _encode(parts * (factor if kind == "tensor" else factor.unsqueeze(-1)), dtype)
    codes = codes.flatten(-2)[..., :H].contiguous()
    if kind == "nvfp4":
        return codes[..., ::2] | codes[..., 1::2] << 4, torch.where(parts.isnan().any(-1), _NAN, scale)
    return codes, scale


def _scales(amax: Tensor, kind: str, dtype: torch.dtype, amax_of_all: Tensor) -> tuple[Tensor, Tensor]:
    """The scales as stored, and the float32 factors that elements are multiplied by."""
    if kind == "mxfp8":  # the biased exponent of float32 (plus 127)
        exponent = ((amax.view(torch.int32) >> 23) - FORMATS[dtype].largest_exponent).clamp_min(0)
        return exponent.to(torch.uint8), ((254 - exponent) << 23).view(torch.float32)
    if kind == "nvfp4":
        unit = 1.0 / _tensor_scale(amax_of_all)
        scale = (
            (_divided(amax, 6.0) * unit).clamp(2.0**-9, 448.0).to(torch.float8_e4m3fn)
        )  # at least the smallest e4m3 value
        return scale.view(torch.uint8), unit / scale.float()
    scale = _divided(amax, FORMATS[dtype].largest).clamp_min(SMALLEST_SCALE)
    return scale, 1.0 / scale


def _tensor_scale(amax: Tensor) -> Tensor:
    return _divided(amax, 448.0 * 6.0).clamp_min(SMALLEST_TENSOR_SCALE)


def _divided(x: Tensor, divisor: float) -> Tensor:
    """The nearest float32 to the quotient: on a GPU, torch multiplies by the reciprocal of a number on the host."""
    return x / x.new_full((), divisor)


def _amax(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest magnitude along the last dimension, for values that were in ``dtype``; inf counts as its maximum."""
    magnitudes = x.abs().nan_to_num(nan=0.0, posinf=torch.finfo(dtype).max)
    return magnitudes.amax(-1) if x.numel() else magnitudes.sum(-1)  # amax of an empty tensor raises, its sum is 0


def _encode(y: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest codes to ``y``, one per byte."""
    largest = FORMATS[dtype].largest
    if dtype != torch.float4_e2m1fn_x2:
        return y.clamp(-largest, largest).to(dtype).view(torch.uint8)  # only some devices saturate in casts
    magnitude = y.abs().nan_to_num(nan=largest).clamp_max(largest)
    # codes count in steps of 1/2 below 2, of 1 below 4, and of 2 above
    code = torch.where(magnitude < 2, (2 * magnitude).round(), magnitude.round() + 2)
    code = torch.where(magnitude < 4, code, (magnitude / 2).round() + 4)
    return code.to(torch.uint8) | y.signbit().to(torch.uint8) << 3


def _forward(x: Tensor, kind: str, dtype: torch.dtype, transpose: bool) -> Outputs:
    outputs = outputs_of(x, kind, dtype, transpose)
    values, scale, tensor_scale, values_t, scale_t = outputs
    layout, rows = LAYOUTS[kind], x.flatten(0, 1)
    amax = x.new_zeros((), dtype=torch.float32)
    for block in blocks(*rows.shape) if layout.of_all else ():
        amax = torch.maximum(amax, _amax(rows[block].float().flatten(), x.dtype))
    if kind == "nvfp4":
        tensor_scale.copy_(_tensor_scale(amax))
    if kind == "tensor":
        scale.copy_(_scales(amax, kind, dtype, amax)[0])

    def fill(x: Tensor, values: Tensor, scale: Tensor) -> None:
        step = 128 if layout.tiled else 1
        for block in blocks(-(-x.shape[0] // step), step * x.shape[1]):
            rows = slice(block.start * step, block.stop * step)
            values[rows], scales = _quantize_rows(x[rows], kind, dtype, amax)
            if kind != "tensor":
                scale[block] = scales

    for matrix in range(x.shape[0]):
        fill(x[matrix], values[matrix], scale if kind == "tensor" else scale[matrix])
        if transpose and layout.symmetric:
            values_t[matrix] = values[matrix].mT
        elif transpose:
            fill(x[matrix].mT, values_t[matrix], scale_t[matrix])
    return outputs


blocked = register_without_gradient("quantize_blocked", _forward, outputs_of, opaque=True)
