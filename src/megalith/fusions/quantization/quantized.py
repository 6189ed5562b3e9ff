"""Quantized tensors: number formats, which values share a scale, and dequantization.

    x ~ values * scale                   one scale per tensor, row or block
    x ~ values * scale * tensor_scale    nvfp4, whose block scales are 8-bit numbers themselves

Formats: Micikevicius et al. 2022, "FP8 Formats for Deep Learning", arXiv:2209.05433. mxfp8, and 4 bits: Open Compute
Project 2023, "OCP Microscaling Formats (MX) Specification 1.0". Blocks of 128: DeepSeek-AI 2024, "DeepSeek-V3",
arXiv:2412.19437. nvfp4: NVIDIA 2025, "Pretraining Large Language Models with NVFP4", arXiv:2509.25149.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megalith.errors import ConfigError

__all__ = [
    "FORMATS",
    "LAYOUTS",
    "SMALLEST_SCALE",
    "SMALLEST_TENSOR_SCALE",
    "Format",
    "Kind",
    "Layout",
    "Outputs",
    "Quantized",
    "dequantize",
    "groups",
    "outputs_of",
]

Kind = Literal["tensor", "row", "block128", "block128x128", "mxfp8", "nvfp4"]
Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

# below this, the reciprocal that elements are multiplied by would overflow float32
SMALLEST_SCALE = 2.0**-126
SMALLEST_TENSOR_SCALE = 2.0**-117  # for nvfp4, whose block scales are at least 2^-9


class Format(NamedTuple):
    """A low-precision format: its usual name, from exponent and mantissa bits, and its largest value."""

    name: str
    largest: float

    @property
    def largest_exponent(self) -> int:
        """The exponent of the largest value, which is subtracted from that of a power-of-two scale."""
        return math.frexp(self.largest)[1] - 1


FORMATS = {
    torch.float8_e4m3fn: Format("e4m3", 448.0),
    torch.float8_e5m2: Format("e5m2", 57344.0),
    torch.float4_e2m1fn_x2: Format("e2m1", 6.0),
}


class Layout(NamedTuple):
    """Which values share a scale, and the dtypes.

    Args:
        columns: how many values of a row share a scale; None for all.
        scale: the dtype of scales.
        dtypes: the dtypes of values, the default first.
        tiled: whether 128 rows share a scale, instead of one.
        of_all: whether something is shared by all values of a tensor.
        symmetric: whether the transpose has the same scales, and therefore the same values.
    """

    columns: int | None
    scale: torch.dtype = torch.float32
    dtypes: tuple[torch.dtype, ...] = (torch.float8_e4m3fn, torch.float8_e5m2)
    tiled: bool = False
    of_all: bool = False
    symmetric: bool = False


LAYOUTS = {
    "tensor": Layout(None, of_all=True, symmetric=True),
    "row": Layout(None),
    "block128": Layout(128),
    "block128x128": Layout(128, tiled=True, symmetric=True),
    "mxfp8": Layout(32, torch.float8_e8m0fnu),
    "nvfp4": Layout(16, torch.float8_e4m3fn, (torch.float4_e2m1fn_x2,), of_all=True),
}


@dataclass(frozen=True)
class Quantized:
    """A quantized tensor [..., H]. Not differentiable.

    Attributes:
        values: [..., H] in float8_e4m3fn or float8_e5m2; for nvfp4 [..., H/2] in float4_e2m1fn_x2, two values per byte,
            the even column in the low bits.
        scale: factors for the values. In float32 for tensor [], row [..., 1], block128 [..., H/128] and block128x128
            [..., R/128, H/128]; mxfp8: [..., H/32] in float8_e8m0fnu; nvfp4: [..., H/16] in float8_e4m3fn. Sizes are
            rounded up: the last block may be smaller. Those of block128 are column-major:
            strides (1, R) for R rows and more than one column.
        kind: which values share a scale.
        tensor_scale: [] in float32, for nvfp4 only.
        transposed: the transpose, quantized along its own rows, if requested.
    """

    values: Tensor
    scale: Tensor
    kind: Kind
    tensor_scale: Tensor | None = None
    transposed: "Quantized | None" = None


def dequantize(quantized: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the tensor [..., H] that ``quantized`` represents: multiplied in float32, rounded once to ``dtype``.

    Plain torch, for devices without matrix products on such operands, and for tests.

    Raises:
        ConfigError: ``dtype`` is not floating point, or has fewer than 16 bits.
    """
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise ConfigError(f"dtype must be float16, bfloat16, float32 or float64; got {dtype}")
    values, scale, layout = _numbers(quantized.values), quantized.scale.float(), LAYOUTS[quantized.kind]
    if layout.columns is not None:
        scale = scale.repeat_interleave(layout.columns, dim=-1)[..., : values.shape[-1]]
    if layout.tiled:
        scale = scale.repeat_interleave(128, dim=-2)[..., : values.shape[-2], :]
    values = values * scale
    return (values if quantized.tensor_scale is None else values * quantized.tensor_scale).to(dtype)


def groups(x: Tensor, size: int | None) -> Tensor:
    """``x`` [..., H] as [..., H/size, size], padded with zeros; as [..., 1, H] if ``size`` is None."""
    if size is None:
        return x.unsqueeze(-2)
    if missing := -x.shape[-1] % size:
        x = torch.nn.functional.pad(x, (0, missing))
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def outputs_of(x: Tensor, kind: str, dtype: torch.dtype, transpose: bool) -> Outputs:
    """Allocates the results of quantizing ``x`` [N, R, H]; empty if not applicable or not requested.

    values, as bytes   [N, R, H]; for nvfp4 [N, R, H/2]
    scale              tensor []; block128x128 [N, R/128, H/128]; else [N, R, H/columns]; as bytes, if not float32
    tensor_scale       [] in float32, for nvfp4
    values_t, scale_t  for ``x.mT``; if its scales are those of ``x``, only values

    Scales of block128 are column-major, [N, H/128, R] in memory, as cuBLAS's products read them.
    """
    N, R, H = x.shape
    layout = LAYOUTS[kind]
    per_byte = 2 if kind == "nvfp4" else 1
    scale_dtype = torch.float32 if layout.scale == torch.float32 else torch.uint8

    def values_of(R: int, H: int) -> Tensor:
        return x.new_empty((N, R, H // per_byte), dtype=torch.uint8)

    def scale_of(R: int, H: int) -> Tensor:
        rows = -(-R // 128) if layout.tiled else R
        columns = 1 if layout.columns is None else -(-H // layout.columns)
        if kind == "block128":
            return x.new_empty((N, columns, rows), dtype=scale_dtype).mT
        return x.new_empty(() if kind == "tensor" else (N, rows, columns), dtype=scale_dtype)

    none = x.new_empty(0, dtype=torch.uint8)
    return (
        values_of(R, H),
        scale_of(R, H),
        x.new_empty(() if kind == "nvfp4" else 0, dtype=torch.float32),
        values_of(H, R) if transpose else none,
        scale_of(H, R) if transpose and not layout.symmetric else none.clone(),
    )


def _numbers(values: Tensor) -> Tensor:
    """Values in float32; torch casts from all formats except those with two values per byte."""
    if values.dtype != torch.float4_e2m1fn_x2:
        return values.float()
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=values.device)
    table = torch.cat((magnitudes, -magnitudes))
    codes = values.view(torch.uint8)
    return table[torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2).int()]
