"""Triton kernels of the keys and values of fused_mla_yarn_rope_apply.

T = S * B tokens, A heads of K + V columns read and K + 2 * HALF and V written. A program handles all heads of BLOCK_T
tokens: the shared part of the keys is read and rotated once, and its gradient is summed over the heads in registers.
"""

import triton
import triton.language as tl
from torch import Tensor

from megalith.fusions.core.grids import cdiv, next_power_of_2
from megalith.fusions.core.registration import wrap_triton
from megalith.fusions.core.rows import contiguous_columns
from megalith.fusions.rope.kernels.rope import load_parts, load_tables, rotate, store_parts, table_arguments
from megalith.fusions.rope.mla_formulas import OPERATOR
from megalith.fusions.rope.rotation import Tables, reads_pairs

__all__ = ["op"]

_TILE = 2048  # elements per tile, untuned


@triton.jit
def _copy(source, to, rows, NUM: tl.constexpr, BLOCK: tl.constexpr):
    """Copies NUM columns of rows that begin at ``source`` and ``to`` [tokens, heads, 1]."""
    col = tl.arange(0, BLOCK)[None, None, :]
    mask = rows & (col < NUM)
    tl.store(to + col, tl.load(source + col, mask=mask), mask=mask)


@triton.jit
def _forward_kernel(
    kv_ptr, pe_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, positions_ptr,
    table_stride_s, table_stride_b, num_rows, position_stride_s, position_stride_b, position_stride_p,
    kv_stride_s, kv_stride_b, kv_stride_a, pe_stride_s, pe_stride_b, T, B,
    A: tl.constexpr, K: tl.constexpr, V: tl.constexpr, HALF: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None, None]
    s, b, in_range = token // B, token % B, token < T
    cos, sin = load_tables(
        cos_ptr, sin_ptr, positions_ptr, s, b, in_range, table_stride_s, table_stride_b, num_rows,
        position_stride_s, position_stride_b, position_stride_p, HALF, BLOCK_HALF, None, None,
    )  # fmt: skip
    first, second = load_parts(pe_ptr + s * pe_stride_s + b * pe_stride_b, in_range, HALF, BLOCK_HALF, READ)
    first, second = rotate(first, second, cos, sin, False)
    for start in range(0, A, BLOCK_A):
        head = (start + tl.arange(0, BLOCK_A)).to(tl.int64)[None, :, None]
        rows = in_range & (head < A)
        kv = kv_ptr + s * kv_stride_s + b * kv_stride_b + head * kv_stride_a
        k = k_ptr + (token * A + head) * (K + 2 * HALF)
        _copy(kv, k, rows, K, BLOCK_K)
        store_parts(k + K, first, second, rows, HALF, BLOCK_HALF, WRITE)
        _copy(kv + K, v_ptr + (token * A + head) * V, rows, V, BLOCK_V)


@triton.jit
def _backward_kernel(
    dk_ptr, dv_ptr, dkv_ptr, dpe_ptr, cos_ptr, sin_ptr, positions_ptr,
    table_stride_s, table_stride_b, num_rows, position_stride_s, position_stride_b, position_stride_p,
    dk_stride_s, dk_stride_b, dk_stride_a, dv_stride_s, dv_stride_b, dv_stride_a, T, B,
    A: tl.constexpr, K: tl.constexpr, V: tl.constexpr, HALF: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None, None]
    s, b, in_range = token // B, token % B, token < T
    cos, sin = load_tables(
        cos_ptr, sin_ptr, positions_ptr, s, b, in_range, table_stride_s, table_stride_b, num_rows,
        position_stride_s, position_stride_b, position_stride_p, HALF, BLOCK_HALF, None, None,
    )  # fmt: skip
    first = tl.zeros([BLOCK_T, BLOCK_A, BLOCK_HALF], dtype=tl.float32)
    second = tl.zeros([BLOCK_T, BLOCK_A, BLOCK_HALF], dtype=tl.float32)
    for start in range(0, A, BLOCK_A):
        head = (start + tl.arange(0, BLOCK_A)).to(tl.int64)[None, :, None]
        rows = in_range & (head < A)
        dk = dk_ptr + s * dk_stride_s + b * dk_stride_b + head * dk_stride_a
        dv = dv_ptr + s * dv_stride_s + b * dv_stride_b + head * dv_stride_a
        dkv = dkv_ptr + (token * A + head) * (K + V)
        _copy(dk, dkv, rows, K, BLOCK_K)
        _copy(dv, dkv + K, rows, V, BLOCK_V)
        more_first, more_second = load_parts(dk + K, rows, HALF, BLOCK_HALF, WRITE)
        first += more_first
        second += more_second
    first, second = tl.sum(first, axis=1, keep_dims=True), tl.sum(second, axis=1, keep_dims=True)
    first, second = rotate(first, second, cos, sin, True)
    store_parts(dpe_ptr + token * 2 * HALF, first, second, in_range, HALF, BLOCK_HALF, READ)


def _forward(
    kv: Tensor, k_pe: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, k_dim: int, layout: str
) -> tuple[Tensor, Tensor]:
    k, v = OPERATOR.outputs(kv, k_pe, cos, sin, positions, k_dim, layout)
    S, B, A, V = v.shape
    if S * B:
        sizes = _sizes(A, k_dim, V, cos.shape[-1], layout)
        kv, k_pe = contiguous_columns(kv), contiguous_columns(k_pe)
        wrap_triton(_forward_kernel)[(cdiv(S * B, sizes["BLOCK_T"]),)](
            kv, k_pe, k, v, *table_arguments(Tables(cos, sin, positions)), *kv.stride()[:3], *k_pe.stride()[:2],
            S * B, B, **sizes,
        )  # fmt: skip
    return k, v


def _backward(
    dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, layout: str
) -> tuple[Tensor, Tensor]:
    dkv, dk_pe = OPERATOR.gradients(dk, dv, cos, sin, positions, layout)
    S, B, A, V = dv.shape
    if S * B:
        sizes = _sizes(A, dkv.shape[-1] - V, V, cos.shape[-1], layout)
        dk, dv = contiguous_columns(dk), contiguous_columns(dv)
        wrap_triton(_backward_kernel)[(cdiv(S * B, sizes["BLOCK_T"]),)](
            dk, dv, dkv, dk_pe, *table_arguments(Tables(cos, sin, positions)), *dk.stride()[:3], *dv.stride()[:3],
            S * B, B, **sizes,
        )  # fmt: skip
    return dkv, dk_pe


def _sizes(A: int, K: int, V: int, HALF: int, layout: str) -> dict[str, int | bool]:
    BLOCK_K, BLOCK_V, BLOCK_HALF = (next_power_of_2(columns) for columns in (K, V, HALF))
    widest = max(BLOCK_K, BLOCK_V, 2 * BLOCK_HALF)
    BLOCK_A = max(1, min(next_power_of_2(A), _TILE // widest))
    return {
        "A": A,
        "K": K,
        "V": V,
        "HALF": HALF,
        "READ": reads_pairs(layout, False),
        "WRITE": reads_pairs(layout, True),
        "BLOCK_T": max(1, _TILE // (BLOCK_A * widest)),
        "BLOCK_A": BLOCK_A,
        "BLOCK_K": BLOCK_K,
        "BLOCK_V": BLOCK_V,
        "BLOCK_HALF": BLOCK_HALF,
    }


op = OPERATOR.register("mla_rope_kv", _forward, _backward)
