"""Triton kernels of fused_weighted_squared_relu.

T tokens (rows), F ffn hidden size (columns). Rows may be strided; columns are contiguous.
"""

import triton
import triton.language as tl
from torch import Tensor

from megalith.fusions.activation.weighted_squared_relu_formulas import OPERATOR
from megalith.fusions.core.grids import cdiv
from megalith.fusions.core.kernels.activations import relu, tile_of
from megalith.fusions.core.registration import wrap_triton
from megalith.fusions.core.rows import contiguous_columns

__all__ = ["op"]


@triton.jit
def _forward_kernel(x_ptr, w_ptr, y_ptr, x_stride, F, BLOCK_F: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # row * stride passes 2^31 in a large batch
    col = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = col < F
    x = relu(tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32))
    w = tl.load(w_ptr + row).to(tl.float32)
    tl.store(y_ptr + row * F + col, x * x * w, mask=mask)


@triton.jit
def _backward_kernel(dy_ptr, x_ptr, w_ptr, dx_ptr, dw_ptr, dy_stride, x_stride, F, BLOCK_F: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    w = tl.load(w_ptr + row).to(tl.float32)
    dw = tl.zeros([BLOCK_F], dtype=tl.float32)
    for start in range(0, F, BLOCK_F):  # one program per row, so dw needs no atomics and is deterministic
        col = start + tl.arange(0, BLOCK_F)
        mask = col < F
        dy = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0).to(tl.float32)
        x = relu(tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32))
        dw += dy * x * x
        tl.store(dx_ptr + row * F + col, 2.0 * dy * w * x, mask=mask)
    tl.store(dw_ptr + row, tl.sum(dw, axis=0))


def _forward(x: Tensor, weights: Tensor) -> Tensor:
    T, F = x.shape
    y = OPERATOR.outputs(x, weights)
    if y.numel():
        x, weights = contiguous_columns(x), weights.contiguous()
        block, num_warps = tile_of(F)
        wrap_triton(_forward_kernel)[(T, cdiv(F, block))](
            x, weights, y, x.stride(0), F, BLOCK_F=block, num_warps=num_warps
        )
    return y


def _backward(dy: Tensor, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    T, F = x.shape
    dx, dw = OPERATOR.gradients(dy, x, weights)
    if dx.numel() == 0:
        return dx, dw.zero_()
    dy, x, weights = contiguous_columns(dy), contiguous_columns(x), weights.contiguous()
    block, num_warps = tile_of(F)
    wrap_triton(_backward_kernel)[(T,)](
        dy, x, weights, dx, dw, dy.stride(0), x.stride(0), F, BLOCK_F=block, num_warps=num_warps
    )
    return dx, dw


op = OPERATOR.register("weighted_squared_relu", _forward, _backward)
