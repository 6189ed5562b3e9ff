"""Linear layers that multiply in 8 bits, with a scale per block of numbers ("blockwise").

    y = Q(x) Q(W)^T + b        dx = Q(dy) Q(W)        dW = Q(dy^T) Q(x^T)^T

Q rounds to float8_e4m3fn. x and dy have a scale per 128 numbers of a row; W one per 128 x 128 numbers, so that W and
its transpose round alike; for dW, x^T and dy^T have one per 128 tokens of a sequence. Products are summed in float32
and rounded once. DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", arXiv:2412.19437, section 3.3.

A scale depends on one block alone, so a layout that does not split a block computes the same numbers: there is no
largest magnitude to agree on between ranks, and none to remember from step to step. For dW, rows are put in the order
of their sequences first, and the micro-batch size changes nothing either. Saved for backward: x^T in 8 bits.

On a Hopper GPU these are products of cuBLAS. Elsewhere, and in float64, both operands are dequantized and multiplied in
float32 (or float64): the same numbers, up to the order of sums, at several times the cost of a plain product.
"""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import ScalingType, scaled_mm

from megalith.fusions import Quantized, dequantize, quantize
from megalith.fusions.core.registration import register_without_gradient
from megalith.fusions.core.rows import wide
from megalith.fusions.quantization.quantized import Kind

__all__ = ["ALIGNMENT", "BLOCK", "BlockwiseProduct", "why_not_fp8"]

BLOCK = 128  # numbers that share a scale
ALIGNMENT = 16  # every size of a product is a multiple of this, for cuBLAS
_HOPPER = (9, 0)
_PADDED_SCALES = 4  # cuBLAS reads the scales of a weight in multiples of this, along its input features


def why_not_fp8(device: torch.device) -> str | None:
    """Returns why ``device`` cannot multiply in 8 bits with scales per block, in one clause; None if it can."""
    if device.type != "cuda":
        return None  # emulated
    if torch.version.hip is not None:
        return "torch has no such products for AMD GPUs"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != _HOPPER:
        name = torch.cuda.get_device_name(device)
        return f"only GPUs of compute capability 9.0 (H100, H200) have such products; {name} has {major}.{minor}"
    return None


class BlockwiseProduct:
    """A ``MatrixProduct`` in 8 bits. One instance may serve all layers of a model.

    Args:
        wgrad: also compute the gradients of weights in 8 bits; otherwise as a plain product of x and dy.
    """

    def __init__(self, *, wgrad: bool = True) -> None:
        self.wgrad = wgrad
        # the last input and its operands: the projections to q, k and v share one
        self._last: tuple[weakref.ref[Tensor], int, bool, tuple[Tensor, ...]] | None = None

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """(x [..., in], weight [out, in], bias [out] or None) -> [..., out] in the dtype of ``x``.

        For gradients of weights in 8 bits, x is [S, B, in] or [T, in], and scales are per 128 of S or T. One output is
        too narrow for 8 bits, and computed in the dtype of ``x``.
        """
        if weight.shape[0] == 1:  # the gate of shared experts
            return torch.nn.functional.linear(x, weight, bias)
        transposes = self.wgrad and weight.requires_grad and torch.is_grad_enabled()
        y: Tensor = _Blockwise.apply(x, weight, transposes, *self._operands(x, transposes))
        return y if bias is None else y + bias

    def _operands(self, x: Tensor, transposes: bool) -> tuple[Tensor, ...]:
        if torch.compiler.is_compiling():  # which finds common operands itself
            return _operands(x, transposes)
        if self._last is not None:
            last, version, transposed, operands = self._last
            if last() is x and version == x._version and transposed >= transposes:
                return operands
        operands = _operands(x, transposes)
        self._last = weakref.ref(x, self._forget), x._version, transposes, operands
        return operands

    def _forget(self, dead: "weakref.ref[Tensor]") -> None:
        if self._last is not None and self._last[0] is dead:
            self._last = None


class _Blockwise(Function):
    """The product of an input, given in 8 bits, and a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, transposes: bool, *operands: Tensor) -> Tensor:
        """``operands``: values and scales of x, then those of x^T if ``transposes``."""
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        ctx.by_sequence = transposes
        kept = operands[2:4] if transposes else (x,)
        ctx.save_for_backward(weight if needs_dx else None, *(kept if needs_dw else ()))
        y = _product(_of_rows(*operands[:2]), _quantized(weight, "block128x128"), x.dtype)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        dx = dw = None
        needs_dw = len(kept) > 0
        transposes = needs_dw and ctx.by_sequence
        operands = _operands(dy, transposes) if transposes or weight is not None else ()
        if weight is not None:
            of_weight = _quantized(weight, "block128x128", transpose=True).transposed
            assert of_weight is not None, "requested"
            dx = _product(_of_rows(*operands[:2]), of_weight, dy.dtype).view(*dy.shape[:-1], -1)
        if transposes:
            dw = _product(_of_rows(*operands[2:]), _of_rows(*kept), dy.dtype)
        elif needs_dw:
            dw = dy.reshape(-1, dy.shape[-1]).t() @ kept[0].reshape(-1, kept[0].shape[-1])
        return dx, dw, *[None] * (len(ctx.needs_input_grad) - 2)


def _operands(x: Tensor, transposes: bool) -> tuple[Tensor, ...]:
    """Values [T, F] and scales of ``x``, and, if ``transposes``, values [F, T] and scales of its transpose.

    The transpose of [S, B, F] is in the order of sequences: T is B S there.
    """
    x = x.detach()
    rows = x.reshape(-1, x.shape[-1])
    if not transposes:
        of_rows = _quantized(rows, "block128")
        return of_rows.values, of_rows.scale
    in_order = x.dim() < 3 or x.shape[1] == 1
    of_rows = _quantized(rows, "block128", transpose=in_order)
    by_sequence = of_rows if in_order else _quantized(x.transpose(0, 1).flatten(0, 1), "block128", transpose=True)
    of_columns = by_sequence.transposed
    assert of_columns is not None, "requested"
    return of_rows.values, of_rows.scale, of_columns.values, of_columns.scale


def _quantized(x: Tensor, kind: Kind, *, transpose: bool = False) -> Quantized:
    """``quantize``; on a CPU as an operator that torch.compile does not trace, which miscompiles the formulas there."""
    return quantize(x, kind, transpose=transpose, backend="blocked" if x.device.type == "cpu" else None)


def _of_rows(values: Tensor, scale: Tensor) -> Quantized:
    return Quantized(values, scale, "block128")


def _product(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """a b^T for a [M, K] of kind block128, and b [N, K] of kind block128 or block128x128 -> [M, N] in ``dtype``."""
    if not _in_library(a.values.device, dtype):
        return _emulate(a.values, a.scale, b.values, b.scale, b.kind, dtype)
    tiled = b.kind == "block128x128"
    y: Tensor = scaled_mm(
        a.values,
        b.values.t(),
        _along_rows(a.scale),
        ScalingType.BlockWise1x128,
        _padded(b.scale) if tiled else _along_rows(b.scale),
        ScalingType.BlockWise128x128 if tiled else ScalingType.BlockWise1x128,
        output_dtype=dtype,
    )
    return y


def _emulated(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    of_b = Quantized(b, b_scale, "block128x128" if kind == "block128x128" else "block128")
    acc = wide(dtype)
    return (dequantize(_of_rows(a, a_scale), acc) @ dequantize(of_b, acc).t()).to(dtype)


def _empty(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=dtype)


# an operator that torch.compile does not trace: torch 2.13 miscompiles a block that is not full (inf in dx)
_emulate = register_without_gradient("emulate_blockwise_product", _emulated, _empty, opaque=True)


def _in_library(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype != torch.float64


def _along_rows(scale: Tensor) -> Tensor:
    """Scales [R, C] with contiguous columns, as ``quantize`` makes them."""
    return scale if scale.stride() == (1, scale.shape[0]) else scale.t().contiguous().t()


def _padded(scale: Tensor) -> Tensor:
    """Scales [N, K] of the blocks of a weight as cuBLAS reads them: [K, N], K padded to a multiple of four."""
    missing = -scale.shape[1] % _PADDED_SCALES
    scale = scale.contiguous()
    return (torch.nn.functional.pad(scale, (0, missing)) if missing else scale).t()
