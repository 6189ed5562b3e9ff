"""Products of linear layers in 8 bits, with a scale per block, compared with plain ones in bfloat16."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.fusions.clock import Clock, memory_of
from benchmarks.restartable import Item, Line
from megalith.acceleration import fp8_utils
from megalith.acceleration.fp8_utils import BlockwiseProduct, why_not_fp8
from megalith.fusions import quantize
from megalith.parallel.build_options import MatrixProduct
from megalith.parallel.linear import linear

__all__ = ["fp8", "items"]

_PLAIN, _FP8, _PLAIN_WGRAD, _QUANTIZE = "plain", "in 8 bits", "in 8 bits, weight gradient plain", "quantize alone"
_REPEATS = 10


class _Sizes(NamedTuple):
    """B sequences of S tokens, features in and out."""

    S: int
    B: int
    IN: int
    OUT: int

    @property
    def flops(self) -> int:
        """FLOPs of a product; forward and backward take three."""
        return 2 * self.S * self.B * self.IN * self.OUT


_SIZES = (
    _Sizes(8192, 1, 4096, 4096),
    _Sizes(8192, 1, 4096, 14336),
    _Sizes(8192, 1, 14336, 4096),
    _Sizes(4096, 2, 4096, 14336),
)
_TINY = (_Sizes(128, 1, 128, 256),)


def items(tiny: bool) -> list[Item]:
    """Arguments of ``fp8``: one contender for one size each."""
    sizes, device = (_TINY, "cpu") if tiny else (_SIZES, "cuda")
    return [
        Item(f"{one.S} x {one.B}, {one.IN} to {one.OUT}, {contender}", (contender, tuple(one), device))
        for one in sizes
        for contender in (_PLAIN, _FP8, _PLAIN_WGRAD, _QUANTIZE)
    ]


def fp8(contender: str, sizes: tuple[int, ...], device: str) -> Line:
    """Seconds, TFLOP/s and peak memory of a product and its gradients; its distance from a plain one in float32.

    Of quantization alone: seconds of the input, as forward quantizes it, and of the weight in forward and backward.
    """
    if (reason := why_not_fp8(torch.device(device), torch.bfloat16)) and contender != _PLAIN:
        return {"skipped": reason}
    shape, dtype = _Sizes(*sizes), torch.bfloat16
    torch.manual_seed(0)
    x = torch.randn(shape.S, shape.B, shape.IN, device=device, dtype=dtype).requires_grad_()
    weight = (torch.randn(shape.OUT, shape.IN, device=device, dtype=dtype) * shape.IN**-0.5).requires_grad_()
    dy = torch.randn(shape.S, shape.B, shape.OUT, device=device, dtype=dtype)
    clock, repeats = Clock(device), _REPEATS if device == "cuda" else 1
    if contender == _QUANTIZE:
        calls: dict[str, Callable[[], object]] = {
            "input": lambda: fp8_utils._quantize_input(x, True),
            "weight": lambda: quantize(weight, "block128x128"),
            "weight_transposed": lambda: quantize(weight, "block128x128", transpose=True),
        }
        return {f"{name}_seconds": clock.seconds(call, repeats) for name, call in calls.items()}
    product: MatrixProduct = linear if contender == _PLAIN else BlockwiseProduct(wgrad=contender == _FP8)

    def forward() -> Tensor:
        return product(x.view_as(x), weight, None)  # another tensor, whose quantization is not remembered

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), (x, weight), dy)

    line: Line = {"forward_seconds": clock.seconds(forward, repeats), "both_seconds": clock.seconds(both, repeats)}
    line["forward_tflops"] = shape.flops / line["forward_seconds"] / 1e12
    line["both_tflops"] = 3 * shape.flops / line["both_seconds"] / 1e12
    names = ("y", "dx", "dw")
    wide = _results(linear, *(one.detach().float().requires_grad_() for one in (x, weight)), dy.float())
    errors = zip(names, _results(product, x, weight, dy), wide, strict=True)
    line |= {f"error_{name}": ((got.float() - want).norm() / want.norm()).item() for name, got, want in errors}
    return {**line, "peak_bytes": memory_of(both, device).peak}


def _results(product: MatrixProduct, x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    y = product(x, weight, None)
    return y.detach(), *torch.autograd.grad(y, (x, weight), dy)
