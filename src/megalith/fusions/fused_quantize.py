"""Tensors in 8 and 4 bits with a scale for each tensor, row or block; also transposed, from the same pass.

    scale = amax / MAX          values = nearest(x / scale)          MAX: 448 (e4m3), 57344 (e5m2), 6 (e2m1)
    mxfp8:  scale = 2^(floor(log2 amax) - floor(log2 MAX))
    nvfp4:  tensor_scale = amax of x / (448 * 6),   scale = nearest e4m3(amax / 6 / tensor_scale)

amax is the largest magnitude among the numbers that share a scale. ``nearest`` is to even at a tie, and the largest
number from beyond it. An infinity counts as the largest number of its dtype; NaN stays NaN, and counts for nothing.
Sources: see ``quantized``.

N matrices of R rows and H columns. Saved for backward: nothing, there is no gradient. Floor, in bytes an element of
bf16, beside the scales: 2 to read, 1 to write (1/2 of nvfp4), and to write the transpose as much again. For a tensor,
nvfp4, and rows whose transpose is wanted too, x is read once more, before, for the amax.
"""

from collections.abc import Callable, Mapping
from typing import get_args

import torch
from torch import Tensor

from megalith.errors import ConfigError, ShapeError
from megalith.fusions.formulas.checks import check_floating
from megalith.fusions.formulas.quantized import (
    FORMATS,
    LAYOUTS,
    SMALLEST_SCALE,
    SMALLEST_TENSOR_SCALE,
    Kind,
    Outputs,
    Quantized,
    groups,
    outputs_of,
)
from megalith.fusions.paths.backend import Backend, Fusion, compiled
from megalith.fusions.paths.blocks import blocks
from megalith.fusions.paths.library import register_without_gradient

__all__ = ["FUSION", "quantize", "quantize_forward"]

_NAN = 0x7F  # in both formats of 8 bits


def quantize(
    x: Tensor,
    kind: Kind,
    *,
    dtype: torch.dtype | None = None,
    transpose: bool = False,
    backend: Backend | None = None,
) -> Quantized:
    """``x`` in 8 or 4 bits, with the scales that ``dequantize`` multiplies by.

    Args:
        x: [..., H], floating; rows may be strided; float64 is rounded to float32 first.
        kind: which numbers share a scale: all ("tensor"), a row of H ("row"), 128 of a row ("block128", activations),
            128 of each of 128 rows ("block128x128", weights [..., R, H]); 32 of a row, the scale a power of two
            ("mxfp8"); 16 of a row in 4 bits, the scale in 8 ("nvfp4").
        dtype: float8_e4m3fn, the default, or float8_e5m2; of nvfp4 float4_e2m1fn_x2, and nothing else.
        transpose: also give the transpose, [H, T] with all leading dimensions as T ([..., H, R] of block128x128), with
            the scales of its own rows: what the gradient of a weight is a product of.
        backend: the path to take; by default that of ``use(...)``, else the one of the table.

    Returns:
        Constants: what the gradient of rounding is, is for the caller to say.

    Raises:
        ShapeError: ``x`` is not floating, has no columns, or an odd number of what is packed two in a byte.
        ConfigError: an unknown kind, or a dtype that it does not have.
        BackendError: ``backend`` cannot run on ``x``.
    """
    dtype = _check(x, kind, dtype, transpose)
    compute = FUSION.path(x, backend)
    layout, leading, H = LAYOUTS[kind], x.shape[:-2], x.shape[-1]
    R = x.shape[-2] if layout.tiled else x.shape[:-1].numel()
    matrices = x.detach().reshape(leading.numel() if layout.tiled else 1, R, H)
    matrices = matrices.float() if x.dtype == torch.float64 else matrices
    values, scale, tensor_scale, values_t, scale_t = compute(matrices, kind, dtype, transpose)

    def record(values: Tensor, scale: Tensor, rows: torch.Size, transposed: Quantized | None = None) -> Quantized:
        values = values.view(dtype).reshape(*rows, values.shape[-1])
        if kind != "tensor":
            rows = torch.Size((*leading, scale.shape[-2])) if layout.tiled else rows
            scale = scale.view(layout.scale).reshape(*rows, scale.shape[-1])
        return Quantized(values, scale, kind, tensor_scale if kind == "nvfp4" else None, transposed)

    if not transpose:
        return record(values, scale, x.shape[:-1])
    if layout.symmetric:
        scale_t = scale.mT if layout.tiled else scale
    columns = torch.Size((*leading, H) if layout.tiled else (H,))
    return record(values, scale, x.shape[:-1], record(values_t, scale_t, columns))


def quantize_forward(x: Tensor, kind: str, dtype: torch.dtype, transpose: bool) -> Outputs:
    """Reference: the outputs that ``outputs_of`` describes, of ``x`` [N, R, H]."""
    layout, none = LAYOUTS[kind], x.new_empty(0, dtype=torch.uint8)
    amax_of_all = _amax((x if layout.of_all else none).float().flatten(), x.dtype)
    values, scale = _quantize_rows(x, kind, dtype, amax_of_all)
    values_t, scale_t = none, none
    if transpose and layout.symmetric:
        values_t = values.mT.contiguous()
    elif transpose:
        values_t, scale_t = _quantize_rows(x.mT, kind, dtype, amax_of_all)
    tensor_scale = _tensor_scale(amax_of_all) if kind == "nvfp4" else none.float()
    return values, scale, tensor_scale, values_t, scale_t


def _quantize_rows(x: Tensor, kind: str, dtype: torch.dtype, amax_of_all: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes and scales of the rows of ``x`` [..., R, H]; only layouts that are ``of_all`` ask for its amax."""
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
    """The scales as they are stored, and the float32 numbers that their elements are multiplied by."""
    if kind == "mxfp8":  # the exponent as float32 holds it, 127 more than it is
        exponent = ((amax.view(torch.int32) >> 23) - FORMATS[dtype].largest_exponent).clamp_min(0)
        return exponent.to(torch.uint8), ((254 - exponent) << 23).view(torch.float32)
    if kind == "nvfp4":
        unit = 1.0 / _tensor_scale(amax_of_all)
        scale = (amax / 6.0 * unit).clamp(2.0**-9, 448.0).to(torch.float8_e4m3fn)  # at least its smallest number
        return scale.view(torch.uint8), unit / scale.float()
    scale = (amax / FORMATS[dtype].largest).clamp_min(SMALLEST_SCALE)
    return scale, 1.0 / scale


def _tensor_scale(amax: Tensor) -> Tensor:
    return (amax / (448.0 * 6.0)).clamp_min(SMALLEST_TENSOR_SCALE)


def _amax(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest magnitude along the last dimension, of numbers that came in ``dtype``."""
    magnitudes = x.abs().nan_to_num(nan=0.0, posinf=torch.finfo(dtype).max)
    return magnitudes.amax(-1) if x.numel() else magnitudes.sum(-1)  # a maximum of nothing is an error, and a sum 0


def _encode(y: Tensor, dtype: torch.dtype) -> Tensor:
    """The codes nearest to ``y``, one to a byte."""
    largest = FORMATS[dtype].largest
    if dtype != torch.float4_e2m1fn_x2:
        return y.clamp(-largest, largest).to(dtype).view(torch.uint8)  # casts saturate on some devices only
    magnitude = y.abs().nan_to_num(nan=largest).clamp_max(largest)
    # steps of 1/2 below 2, 1 below 4, and 2: the codes count them
    code = torch.where(magnitude < 2, (2 * magnitude).round(), magnitude.round() + 2)
    code = torch.where(magnitude < 4, code, (magnitude / 2).round() + 4)
    return code.to(torch.uint8) | y.signbit().to(torch.uint8) << 3


def _blocked_forward(x: Tensor, kind: str, dtype: torch.dtype, transpose: bool) -> Outputs:
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


_blocked = register_without_gradient("quantize_blocked", _blocked_forward, outputs_of, opaque=True)


def _triton(x: Tensor, kind: str, dtype: torch.dtype, transpose: bool) -> Outputs:
    from megalith.fusions.kernels.quantize import op

    return op(x, kind, dtype, transpose)


_PATHS: Mapping[Backend, Callable[[Tensor, str, torch.dtype, bool], Outputs]] = {
    "triton": _triton,
    "compile": compiled(quantize_forward),
    "blocked": _blocked,
    "reference": quantize_forward,
}
FUSION = Fusion("quantize", _PATHS)


def _check(x: Tensor, kind: str, dtype: torch.dtype | None, transpose: bool) -> torch.dtype:
    """The dtype of the values."""
    if kind not in get_args(Kind):
        raise ConfigError(f"kind must be one of {', '.join(get_args(Kind))}; got {kind!r}")
    choices = LAYOUTS[kind].dtypes
    if dtype is not None and dtype not in choices:
        raise ConfigError(f"dtype of kind {kind!r} must be {' or '.join(map(str, choices))}; got {dtype}")
    check_floating(x=x)
    if x.dim() < (2 if LAYOUTS[kind].tiled else 1) or x.shape[-1] == 0:
        wanted = "[..., R, H]" if LAYOUTS[kind].tiled else "[..., H]"
        raise ShapeError(f"x must be {wanted} with H at least 1; got {list(x.shape)}")
    if kind == "nvfp4":
        sizes = {"columns": x.shape[-1], **({"rows": x.shape[:-1].numel()} if transpose else {})}
        for name, size in sizes.items():
            if size % 2:
                raise ShapeError(f"x must have an even number of {name}, two to a byte of nvfp4; got {list(x.shape)}")
    return dtype or choices[0]
