"""Cases of quantized tensors: their bytes and the bits of their scales, compared exactly."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.fusions import cost
from megalith.fusions.fused_quantize import quantize
from megalith.fusions.quantization.quantize import FUSION
from megalith.fusions.quantization.quantized import Quantized
from tests.fusions.harness import WIDTHS, Case, Inputs

E4M3, E5M2, E2M1 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2
COLUMNS = {"block128": 128, "block128x128": 128, "mxfp8": 32, "nvfp4": 16}


def numbers(dtype: torch.dtype) -> Tensor:
    """The finite non-negative numbers of a format, ordered by code, in float64."""
    if dtype == E2M1:
        return torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    return torch.arange(0x7F if dtype == E4M3 else 0x7C, dtype=torch.uint8).view(dtype).double()


def nearest(y: Tensor, dtype: torch.dtype) -> Tensor:
    """The codes nearest to ``y``, ties to even, found by comparing with every number of the format."""
    table = numbers(dtype).to(y.device)
    middle = (table[1:] + table[:-1]) / 2
    code = torch.searchsorted(middle, y.double().abs().contiguous())  # ties go to the lower one
    tie = y.double().abs() == middle[code.clamp_max(len(middle) - 1)]
    code = code + (tie & (code % 2 == 1) & (code < len(middle)))
    return (code | y.signbit().int() << (3 if dtype == E2M1 else 7)).to(torch.uint8)


def by_rows(x: Tensor, kind: str, dtype: torch.dtype, amax_of_all: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of x [R, H] in float32, and the bits of its scales."""
    R, H = x.shape
    tall = 128 if kind == "block128x128" else 1
    wide = COLUMNS.get(kind, max(1, H))
    groups = -(-H // wide) if kind in COLUMNS else 1
    blocks = torch.nn.functional.pad(x.abs(), (0, groups * wide - H, 0, -R % tall))
    amax = blocks.reshape((R + tall - 1) // tall, tall, groups, wide).amax((1, 3))
    scale, factor = scales(amax_of_all if kind == "tensor" else amax, kind, dtype, amax_of_all)
    if kind != "tensor":
        factor = factor.repeat_interleave(tall, 0)[:R].repeat_interleave(wide, 1)[:, :H]
    codes = nearest(x * factor, dtype)
    if kind == "nvfp4":
        return codes[:, ::2] + 16 * codes[:, 1::2], nearest(scale, E4M3)
    return codes, scale.to(torch.float8_e8m0fnu).view(torch.uint8) if kind == "mxfp8" else scale.view(torch.int32)


def scales(amax: Tensor, kind: str, dtype: torch.dtype, amax_of_all: Tensor) -> tuple[Tensor, Tensor]:
    """The factors for dequantizing and for quantizing."""
    largest = numbers(dtype)[-1].float()
    if kind == "mxfp8":
        scale = 2.0 ** (amax.double().log2().floor() - largest.log2().floor()).clamp_min(-127)
        return scale.float(), (1 / scale).float()
    if kind == "nvfp4":
        unit = 1 / (amax_of_all / 2688).clamp_min(2.0**-117)
        scale = numbers(E4M3)[nearest(amax / 6 * unit, E4M3).int().clamp_min(1)].float()
        return scale, unit / scale
    scale = (amax / largest).clamp_min(2.0**-126)
    return scale, 1 / scale


def formula(x: Tensor, kind: str, dtype: torch.dtype, transpose: bool) -> tuple[Tensor, ...]:
    device, x = x.device, x.detach().float().cpu()
    amax = x.abs().max() if x.numel() else torch.zeros(())
    parts = by_rows(x, kind, dtype, amax)
    if transpose:
        parts += by_rows(x.t().contiguous(), kind, dtype, amax)
    if kind == "nvfp4":
        parts += (((amax / 2688).clamp_min(2.0**-117)).view(torch.int32),)
    return tuple(part.to(device) for part in parts)


def compute(x: Tensor, backend: Any, kind: Any, dtype: torch.dtype, transpose: bool) -> tuple[Tensor, ...]:
    """Returns integers, which torch.equal and torch.compile accept on every device."""
    quantized = quantize(x, kind, dtype=dtype, transpose=transpose, backend=backend)
    parts = bits(quantized) + (() if quantized.transposed is None else bits(quantized.transposed))
    scale = quantized.tensor_scale
    return parts if scale is None else (*parts, scale.view(torch.int32))


def bits(quantized: Quantized) -> tuple[Tensor, Tensor]:
    scale = quantized.scale
    return quantized.values.view(torch.uint8), scale.view(torch.int32 if scale.dtype == torch.float32 else torch.uint8)


def inputs(rows: int, T: int, H: int, dtype: torch.dtype, device: str) -> Inputs:
    """Rows of every magnitude; an even number of them for ``rows`` = 2."""
    x = torch.randn(rows * T, H, device=device) * torch.logspace(-3, 3, rows * T, device=device)[:, None]
    return {"x": x.to(dtype)}


def case(kind: Any, dtype: torch.dtype, transpose: bool) -> Case:
    packed = kind == "nvfp4"
    settings = {"kind": kind, "dtype": dtype, "transpose": transpose}
    return Case(
        f"quantize, {kind}, {str(dtype).removeprefix('torch.')}{', transposed' if transpose else ''}",
        FUSION,
        partial(inputs, 2 if packed else 1),
        partial(compute, **settings),
        partial(formula, **settings),
        cost=partial(cost.quantize, **settings),
        constant=("x",),
        widths=(64, 1000, 1008, 90) if packed else (1, 7, 64, 127, 1000, 1008, 176) if transpose else WIDTHS,
    )


CASES = [
    case("mxfp8", E4M3, True),
    case("tensor", E4M3, True),
    case("row", E4M3, False),
    case("row", E5M2, True),
    case("block128", E4M3, True),
    case("block128x128", E4M3, True),
    case("nvfp4", E2M1, True),
]
