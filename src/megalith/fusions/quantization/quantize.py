"""Tensors in 8 and 4 bits with a scale for each tensor, row or block; also transposed, from the same pass.

    scale = amax / MAX          values = nearest(x / scale)          MAX: 448 (e4m3), 57344 (e5m2), 6 (e2m1)
    mxfp8:  scale = 2^(floor(log2 amax) - floor(log2 MAX))
    nvfp4:  tensor_scale = amax of x / (448 * 6),   scale = nearest e4m3(amax / 6 / tensor_scale)

amax is the largest magnitude among the numbers that share a scale. ``nearest`` is to even at a tie, and the largest
number from beyond it. An infinity counts as the largest number of its dtype; NaN stays NaN, and counts for nothing.
Sources: see ``quantization.quantized``.

N matrices of R rows and H columns. Saved for backward: nothing, there is no gradient. Floor, in bytes an element of
bf16, beside the scales: 2 to read, 1 to write (1/2 of nvfp4), and to write the transpose as much again. For a tensor,
nvfp4, and rows whose transpose is wanted too, x is read once more, before, for the amax.
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
