"""Triton kernels of fused_bias_gelu.

T tokens (rows), F ffn hidden size (columns). Rows may be strided; columns are contiguous.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalith.fusions.activation.bias_gelu_formulas import OPERATOR
from megalith.fusions.core.grids import cdiv
from megalith.fusions.core.kernels.activations import activation, activation_and_slope, tile_of
from megalith.fusions.core.registration import wrap_triton
from megalith.fusions.core.rows import contiguous_columns, rows_per_sum

__all__ = ["op"]


@triton.jit
def _bias(bias_ptr, col, mask, BLOCK_F: tl.constexpr):
    """A block of the bias; 0 without one."""
    bias = tl.zeros([BLOCK_F], dtype=tl.float32)
    if bias_ptr is not None:
        bias += tl.load(bias_ptr + col, mask=mask, other=0.0).to(tl.float32)
    return bias


@triton.jit
def _forward_kernel(x_ptr, bias_ptr, y_ptr, x_stride, F, KIND: tl.constexpr, BLOCK_F: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # row * stride passes 2^31 in a large batch
    col = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = col < F
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
    y = activation(x + _bias(bias_ptr, col, mask, BLOCK_F), KIND)
    tl.store(y_ptr + row * F + col, y, mask=mask)


@triton.jit
def _backward_kernel(
    dy_ptr, x_ptr, bias_ptr, dx_ptr, dbias_ptr, dy_stride, x_stride, T, F, num_rows,
    KIND: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """One block of columns of ``num_rows`` rows: dx of each, and one part of dbias."""
    group = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = col < F
    bias = _bias(bias_ptr, col, mask, BLOCK_F)
    total = tl.zeros([BLOCK_F], dtype=tl.float32)
    for i in range(0, tl.minimum(num_rows, T - group * num_rows)):
        row = group * num_rows + i  # in 64 bits, which a loop over rows need not keep
        dy = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
        _, slope = activation_and_slope(x + bias, KIND)
        dx = dy * slope
        tl.store(dx_ptr + row * F + col, dx, mask=mask)
        total += dx
    if dbias_ptr is not None:
        tl.store(dbias_ptr + group * F + col, total, mask=mask)


def _forward(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    y = OPERATOR.outputs(x, bias, activation)
    T, F = x.shape
    if y.numel():
        x, bias = contiguous_columns(x), None if bias is None else bias.contiguous()
        block, num_warps = tile_of(F)
        wrap_triton(_forward_kernel)[(T, cdiv(F, block))](
            x, bias, y, x.stride(0), F, KIND=activation, BLOCK_F=block, num_warps=num_warps
        )
    return y


def _backward(dy: Tensor, x: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    dx, dbias = OPERATOR.gradients(dy, x, bias, activation)
    T, F = x.shape
    if dx.numel() == 0:
        return dx, dbias.zero_()
    block, num_warps = tile_of(F)
    num_tiles = cdiv(F, block)
    num_rows = 1 if bias is None else rows_per_sum(T, num_tiles)
    groups = cdiv(T, num_rows)
    sums = None if bias is None else x.new_empty(groups, F, dtype=torch.float32)
    dy, x, bias = contiguous_columns(dy), contiguous_columns(x), None if bias is None else bias.contiguous()
    wrap_triton(_backward_kernel)[(groups, num_tiles)](
        dy, x, bias, dx, sums, dy.stride(0), x.stride(0), T, F, num_rows,
        KIND=activation, BLOCK_F=block, num_warps=num_warps,
    )  # fmt: skip
    return dx, dbias if sums is None else sums.sum(dim=0).to(dbias.dtype)


op = OPERATOR.register("bias_gelu", _forward, _backward)
