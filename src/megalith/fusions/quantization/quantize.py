"""Quantization to 8 and 4 bits with a scale per tensor, row or block; also transposed, in the same pass.

    scale = amax / MAX          values = nearest(x / scale)          MAX: 448 (e4m3), 57344 (e5m2), 6 (e2m1)
    mxfp8:  scale = 2^(floor(log2 amax) - floor(log2 MAX))
    nvfp4:  tensor_scale = amax of x / (448 * 6),   scale = nearest e4m3(amax / 6 / tensor_scale)

amax is the largest magnitude among the values that share a scale. ``nearest`` rounds ties to even, and saturates.
Infinities count as the largest value of x's dtype; NaN stays NaN and does not affect amax. Sources: see
``quantization.quantized``.

N matrices of R rows and H columns. Not differentiable. Lower bound, in bytes per bf16 element, without the scales: 2
read, 1 written (1/2 for nvfp4), and as much again for the transpose. For kinds "tensor" and "nvfp4", and for "row" with
a transpose, x is read once more beforehand to compute the amax.
"""

from collections.abc import Callable, Mapping
from typing import get_args

import torch
from torch import Tensor

from megalith.errors import ConfigError, ShapeError
from megalith.fusions.core.checks import check_floating
from megalith.fusions.core.dispatch import Backend, Fusion, compiled
from megalith.fusions.core.registry import registered
from megalith.fusions.quantization.formulas import blocked, reference
from megalith.fusions.quantization.quantized import LAYOUTS, Kind, Outputs, Quantized

__all__ = ["FUSION", "quantize"]


def quantize(
    x: Tensor,
    kind: Kind,
    *,
    dtype: torch.dtype | None = None,
    transpose: bool = False,
    backend: Backend | None = None,
) -> Quantized:
    """Returns ``x`` in 8 or 4 bits, with the scales that ``dequantize`` multiplies by.

    Args:
        x: [..., H], floating point; rows may be strided; float64 is rounded to float32 first.
        kind: which values share a scale: all ("tensor"), a row of H ("row"), 128 in a row ("block128", for
            activations), 128 columns of 128 rows ("block128x128", for weights [..., R, H]); 32 in a row, with a power
            of two as scale ("mxfp8"); 16 in a row, in 4 bits with 8-bit scales ("nvfp4").
        dtype: float8_e4m3fn, the default, or float8_e5m2; for nvfp4 only float4_e2m1fn_x2.
        transpose: also return the transpose, [H, T] with all leading dimensions flattened to T ([..., H, R] for
            block128x128), with scales along its own rows, as needed for weight gradients.
        backend: the path to take; defaults to that of ``use(...)``, else to the operation's default for the device.

    Returns:
        Tensors without a gradient: the caller decides how to differentiate the rounding.

    Raises:
        ShapeError: ``x`` is not floating point, has no columns, or, for nvfp4, an odd number of columns (or rows, if
            transposed), since two values share a byte.
        ConfigError: an unknown kind, or a dtype that the kind does not support.
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


def _triton(x: Tensor, kind: str, dtype: torch.dtype, transpose: bool) -> Outputs:
    from megalith.fusions.quantization.kernels.quantize import op

    return op(x, kind, dtype, transpose)


_PATHS: Mapping[Backend, Callable[[Tensor, str, torch.dtype, bool], Outputs]] = {
    "triton": _triton,
    "compile": compiled(reference),
    "blocked": blocked,
    "reference": reference,
}
FUSION = registered(Fusion("quantize", _PATHS, defaults={"cuda": ("triton",), "cpu": ("blocked",)}))


def _check(x: Tensor, kind: str, dtype: torch.dtype | None, transpose: bool) -> torch.dtype:
    """Checks the arguments and returns the dtype of the values."""
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
                raise ShapeError(f"x must have an even number of {name} for nvfp4, two per byte; got {list(x.shape)}")
    return dtype or choices[0]
