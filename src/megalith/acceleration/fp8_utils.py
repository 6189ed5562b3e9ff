"""FP8 linear layers: GEMMs in 8 bits with block scales, 1x128 and 128x128 ("blockwise").

    y = Q(x) Q(W)^T + b        dx = Q(dy) Q(W)        dW = Q(dy^T) Q(x^T)^T

Q rounds to float8_e4m3fn. x and dy have a scale per 128 numbers of a row; W one per 128 x 128 numbers, so that W and
its transpose round alike; for dW, x^T and dy^T have one per 128 tokens of a sequence. DeepSeek-AI 2024, "DeepSeek-V3
Technical Report", arXiv:2412.19437, section 3.3.

A scale depends on one block alone, so a layout that does not split a block computes the same numbers: there is no
largest magnitude to agree on between ranks, and none to remember from step to step. For dW, tokens are put in the order
of their sequences first, and the micro-batch size changes nothing either; with more than one sequence per micro-batch
that costs a copy, and x and dy are quantized twice. Saved for backward: x^T in 8 bits.

On a Hopper GPU the GEMMs, and with them the accumulation, are cuBLAS's. On a CPU, and in float64 on any device, they
are emulated: both operands are dequantized and multiplied in float32 (or float64). Either rounds the result once.
"""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import ScalingType, linear, pad, scaled_mm

from megalith.fusions import Quantized, dequantize, quantize
from megalith.fusions.core.registration import register_without_gradient
from megalith.fusions.core.rows import not_a_view, wide
from megalith.fusions.quantization.quantized import Kind
from megalith.torch_compat.tensors import is_capturing

__all__ = ["BlockwiseProduct", "why_not_fp8"]

_HOPPER = (9, 0)
_CUDA = (12, 9)  # whose cuBLAS has these products
_SCALES = 4  # cuBLAS reads scales in multiples of this: rows of an input, blocks of a weight's inputs


def why_not_fp8(device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns why ``device`` cannot run block-scaled FP8 GEMMs, in one clause; None if it can, or emulates them.

    ``dtype``: that of the results.
    """
    if not _uses_cublas(device, dtype):
        return None
    if torch.version.hip is not None:
        return "torch has no block-scaled FP8 GEMM for AMD GPUs"
    version = str(torch.version.cuda)
    if tuple(map(int, version.split("."))) < _CUDA:
        return f"it needs a torch built for CUDA {_CUDA[0]}.{_CUDA[1]} or later; this one is for CUDA {version}"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != _HOPPER:
        name = torch.cuda.get_device_name(device)
        return f"it needs a Hopper GPU (H100, H200; compute capability 9.0), and {name} has {major}.{minor}"
    return None


class BlockwiseProduct:
    """An FP8 ``MatrixProduct``. One instance may serve all layers of a model.

    The projections to q, k and v share an input, which is quantized once: the last input's operands are kept until it
    is freed. Writes that autograd does not see (through ``.data`` or numpy) go unnoticed.

    Args:
        wgrad: also compute the gradients of weights in 8 bits; otherwise as a plain product of x and dy.
    """

    def __init__(self, *, wgrad: bool = True) -> None:
        self.wgrad = wgrad
        # an input, its version, whether its transpose is among its operands, and these
        self._last: tuple[weakref.ref[Tensor], int, bool, tuple[Tensor, ...]] | None = None

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """(x [..., in], weight [out, in], bias [out] or None) -> [..., out] in the dtype of ``x``.

        For gradients of weights in 8 bits, x is [S, B, in] or [T, in], and scales are per 128 of S or T. One output is
        too narrow for 8 bits, and computed in the dtype of ``x``.
        """
        if weight.shape[0] == 1:  # the gate of shared experts
            return linear(x, weight, bias)
        transposes = self.wgrad and weight.requires_grad and torch.is_grad_enabled()
        y: Tensor = _Blockwise.apply(x, weight, transposes, *self._operands_of(x, transposes))
        return y if bias is None else y + bias

    def _operands_of(self, x: Tensor, transposes: bool) -> tuple[Tensor, ...]:
        # a compiler finds common operands itself, and a CUDA graph must hold the work of each replay
        if torch.compiler.is_compiling() or x.is_inference() or is_capturing():
            return _quantize_input(x, transposes)
        last = self._last
        if last is not None and last[0]() is x and last[1] == x._version and last[2] >= transposes:
            return last[3]
        operands = _quantize_input(x, transposes)
        self._last = weakref.ref(x, self._forget), x._version, transposes, operands
        return operands

    def _forget(self, dead: "weakref.ref[Tensor]") -> None:
        last = self._last
        if last is not None and last[0] is dead:
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
        y = _product(_of_rows(*operands[:2]), _quantize(weight, "block128x128"), x.dtype)
        return not_a_view(y.view(*x.shape[:-1], weight.shape[0]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        dx = dw = None
        needs_dw = len(kept) > 0
        transposes = needs_dw and ctx.by_sequence
        operands = _quantize_input(dy, transposes) if transposes or weight is not None else ()
        if weight is not None:
            transposed = _quantize(weight, "block128x128", transpose=True).transposed
            assert transposed is not None, "requested"
            dx = _product(_of_rows(*operands[:2]), transposed, dy.dtype).view(*dy.shape[:-1], weight.shape[1])
        if transposes:
            dw = _product(_of_rows(*operands[2:]), _of_rows(*kept), dy.dtype)
        elif needs_dw:
            dw = dy.reshape(-1, dy.shape[-1]).t() @ kept[0].reshape(-1, kept[0].shape[-1])
        return dx, dw, *[None] * (len(ctx.needs_input_grad) - 2)


def _quantize_input(x: Tensor, transposes: bool) -> tuple[Tensor, ...]:
    """Values [T, F] and scales of ``x``, and, if ``transposes``, values [F, T] and scales of its transpose.

    The transpose of [S, B, F] is in the order of sequences: T is B S there.
    """
    x = x.detach()
    rows = x.reshape(-1, x.shape[-1])
    if not transposes:
        of_rows = _quantize(rows, "block128")
        return of_rows.values, of_rows.scale
    in_order = x.dim() < 3 or x.shape[1] == 1
    of_rows = _quantize(rows, "block128", transpose=in_order)
    by_sequence = of_rows if in_order else _quantize(x.transpose(0, 1).flatten(0, 1), "block128", transpose=True)
    transposed = by_sequence.transposed
    assert transposed is not None, "requested"
    return of_rows.values, of_rows.scale, transposed.values, transposed.scale


def _quantize(x: Tensor, kind: Kind, *, transpose: bool = False) -> Quantized:
    """``quantize``; on a CPU an operator that torch.compile does not trace: torch 2.13 miscompiles its formulas."""
    return quantize(x, kind, transpose=transpose, backend="blocked" if x.device.type == "cpu" else None)


def _of_rows(values: Tensor, scale: Tensor) -> Quantized:
    return Quantized(values, scale, "block128")


def _product(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """a b^T for a [M, K] of kind block128, and b [N, K] of kind block128 or block128x128 -> [M, N] in ``dtype``."""
    return _multiply(a.values, a.scale, b.values, b.scale, b.kind, dtype)


def _multiplied(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    if _uses_cublas(a.device, dtype):
        return _by_cublas(a, a_scale, b, b_scale, kind, dtype)
    of_b = Quantized(b, b_scale, "block128x128" if kind == "block128x128" else "block128")
    acc = wide(dtype)
    return (dequantize(_of_rows(a, a_scale), acc) @ dequantize(of_b, acc).t()).to(dtype)


def _result(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=dtype)


# opaque to torch.compile: torch 2.13 miscompiles the emulation of a block that is not full, and cannot trace the
# library's product of one
_multiply = register_without_gradient("blockwise_product", _multiplied, _result, opaque=True)


def _by_cublas(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    M, tiled = a.shape[0], kind == "block128x128"
    if missing := -M % _SCALES:
        a = pad(a.view(torch.uint8), (0, 0, 0, missing)).view(a.dtype)
        a_scale = pad(a_scale, (0, 0, 0, missing))
    y: Tensor = scaled_mm(
        a,
        b.t(),
        _column_major(a_scale),
        ScalingType.BlockWise1x128,
        _of_blocks(b_scale) if tiled else _column_major(b_scale),
        ScalingType.BlockWise128x128 if tiled else ScalingType.BlockWise1x128,
        output_dtype=dtype,
    )
    return y[:M]


def _uses_cublas(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype != torch.float64


def _column_major(scale: Tensor) -> Tensor:
    """Scales [R, C] with strides (1, R), as ``quantize`` returns those of block128; (1, 1) will do for one column."""
    return scale if scale.stride() == (1, scale.shape[0]) else scale.t().contiguous().t()


def _of_blocks(scale: Tensor) -> Tensor:
    """Scales [N, K] of the blocks of a weight as cuBLAS reads them: [K, N], K padded to a multiple of four."""
    missing = -scale.shape[1] % _SCALES
    scale = scale.contiguous()
    return (pad(scale, (0, missing)) if missing else scale).t()
