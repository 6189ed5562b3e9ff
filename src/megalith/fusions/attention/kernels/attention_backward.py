"""Triton kernels of fused_attention, backward: delta per query; dk and dv per block of keys; dq per block of queries.

The probabilities are recomputed from the scores and lse. Each gradient is summed by one program in a fixed order: over
the queries of all heads of a group that see its block of keys, or over the keys that its block of queries sees.
"""

# ruff: noqa: UP044  a starred annotation would iterate over the NamedTuple class, which raises TypeError

import math
from typing import Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalith.fusions.attention.formulas import OPERATOR, GivenToBackward
from megalith.fusions.attention.kernels.attention_tiles import (
    Blocks,
    block_columns,
    blocks_of,
    cap_of,
    capped_and_slope,
    interval,
    load_rows,
    strides,
    walk,
)
from megalith.fusions.core.grids import cdiv
from megalith.fusions.core.registration import wrap_triton
from megalith.fusions.core.rows import contiguous_columns

__all__ = ["LOG2_E", "backward"]

LOG2_E = tl.constexpr(math.log2(math.e))
_DELTA_ROWS = 32  # untuned

# untuned, except for 2 bytes and up to 128 columns; keys are (bytes per element, largest number of columns). One stage
# where two would spill: programs share a multiprocessor
_KEYS_BLOCKS = {
    (2, 64): Blocks(32, 64, 4, 1),
    (2, 128): Blocks(32, 64, 4, 1),
    (2, 256): Blocks(16, 32, 8, 1),
    (4, 64): Blocks(16, 32, 8, 1),
    (4, 128): Blocks(16, 32, 4, 1),
    (4, 256): Blocks(16, 16, 8, 1),
}
_QUERIES_BLOCKS = {
    (2, 64): Blocks(128, 64, 8, 1),
    (2, 128): Blocks(64, 32, 4, 2),
    (2, 256): Blocks(64, 16, 8, 1),
    (4, 64): Blocks(64, 32, 8, 1),
    (4, 128): Blocks(32, 16, 8, 1),
    (4, 256): Blocks(16, 16, 8, 1),
}
# from sweeps on an H100 and an H200; for 128 columns, that of dk and dv spills, but backward is 13 to 16 % faster
_LARGE_KEYS_BLOCKS = {(2, 64): Blocks(32, 64, 4, 3), (2, 128): Blocks(64, 64, 4, 2), (2, 256): Blocks(64, 64, 8, 1)}
_LARGE_QUERIES_BLOCKS = {(2, 64): Blocks(128, 32, 8, 3), (2, 256): Blocks(128, 64, 8, 1)}


@triton.jit
def _delta_kernel(
    dout_ptr, out_ptr, dlse_ptr, delta_ptr, dout_s, dout_b, dout_a, Sq, A, num_heads, num_blocks,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    head, block = (program // num_blocks).to(tl.int64), program % num_blocks
    i = block * BLOCK_M + tl.arange(0, BLOCK_M)
    dout = load_rows(dout_ptr + head // A * dout_b + head % A * dout_a, i, dout_s, Sq, DV, BLOCK_DV)
    out = load_rows(out_ptr + head * DV, i, num_heads * DV, Sq, DV, BLOCK_DV)
    delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), axis=1)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + head * Sq + i, mask=i < Sq, other=0.0)
    tl.store(delta_ptr + head * Sq + i, delta, mask=i < Sq)


@triton.jit
def _add_queries(dk, dv, q, dout, k, v, lse, delta, low, high, i, is_full, SCALE: tl.constexpr, CAP: tl.constexpr):
    """dk (without its scale) and dv of a block of keys, with those of the queries ``i`` [M]."""
    s, slope = capped_and_slope(tl.dot(k, tl.trans(q), input_precision="ieee"), CAP)  # [N, M]
    p = tl.exp2(s * (SCALE * LOG2_E) - (lse * LOG2_E)[None, :])
    if not is_full:
        p = tl.where((low[:, None] <= i[None, :]) & (i[None, :] < high[:, None]), p, 0.0)
    dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
    dp = tl.dot(v, tl.trans(dout), input_precision="ieee")
    ds = p * (dp - delta[None, :]) * slope
    return tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee"), dv


@triton.jit
def _keys_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, bounds_ptr, dk_ptr, dv_ptr,
    q_s, q_b, q_a, k_s, k_b, k_g, v_s, v_b, v_g, dout_s, dout_b, dout_a,
    Sq, Sk, G, num_groups, num_blocks, before, after,
    SCALE: tl.constexpr, CAP: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys of one group, of all B * G: over its heads, over the queries that see the keys."""
    program = tl.program_id(0)
    group = (program // num_blocks).to(tl.int64)
    b, g = group // G, group % G
    j = program % num_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    bounds = None if bounds_ptr is None else bounds_ptr + b * 2 * Sk
    low, high = interval(j, Sk, Sq - Sk, after, before, Sq, bounds)
    begin, end, full_low, full_high = walk(low, high, BLOCK_M)
    k = load_rows(k_ptr + b * k_b + g * k_g, j, k_s, Sk, D, BLOCK_D)
    v = load_rows(v_ptr + b * v_b + g * v_g, j, v_s, Sk, DV, BLOCK_DV)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for member in range(0, GROUP):
        a = g * GROUP + member
        q_head = q_ptr + b * q_b + a * q_a
        dout_head = dout_ptr + b * dout_b + a * dout_a
        row = (group * GROUP + member) * Sq
        for start in range(begin, end, BLOCK_M):
            i = start + tl.arange(0, BLOCK_M)
            q = load_rows(q_head, i, q_s, Sq, D, BLOCK_D)
            dout = load_rows(dout_head, i, dout_s, Sq, DV, BLOCK_DV)
            lse = tl.load(lse_ptr + row + i, mask=i < Sq, other=0.0)
            delta = tl.load(delta_ptr + row + i, mask=i < Sq, other=0.0)
            is_full = (full_low <= start) & (start < full_high)
            dk, dv = _add_queries(dk, dv, q, dout, k, v, lse, delta, low, high, i, is_full, SCALE, CAP)
    d, d_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    at = (j.to(tl.int64) * num_groups + group)[:, None]
    tl.store(dk_ptr + at * D + d[None, :], dk * SCALE, mask=(j < Sk)[:, None] & (d < D)[None, :])
    tl.store(dv_ptr + at * DV + d_v[None, :], dv, mask=(j < Sk)[:, None] & (d_v < DV)[None, :])


@triton.jit
def _add_keys(dq, q, dout, k, v, lse, delta, low, high, j, is_full, SCALE: tl.constexpr, CAP: tl.constexpr):
    """dq (without its scale) of a block of queries, with that of the keys ``j`` [N]."""
    s, slope = capped_and_slope(tl.dot(q, tl.trans(k), input_precision="ieee"), CAP)  # [M, N]
    p = tl.exp2(s * (SCALE * LOG2_E) - (lse * LOG2_E)[:, None])
    if not is_full:
        p = tl.where((low[:, None] <= j[None, :]) & (j[None, :] < high[:, None]), p, 0.0)
    dp = tl.dot(dout, tl.trans(v), input_precision="ieee")
    ds = p * (dp - delta[:, None]) * slope
    return tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")


@triton.jit
def _queries_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, bounds_ptr, dq_ptr,
    q_s, q_b, q_a, k_s, k_b, k_g, v_s, v_b, v_g, dout_s, dout_b, dout_a,
    Sq, Sk, A, num_heads, num_blocks, before, after,
    SCALE: tl.constexpr, CAP: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dq of a block of queries of one head, of all B * A: over the keys that they see."""
    program = tl.program_id(0)
    head = (program // num_blocks).to(tl.int64)
    block = num_blocks - 1 - program % num_blocks  # under the causal rule the last has most to do
    b, a = head // A, head % A
    i = block * BLOCK_M + tl.arange(0, BLOCK_M)
    bounds = None if bounds_ptr is None else bounds_ptr + b * 2 * Sq
    low, high = interval(i, Sq, Sk - Sq, before, after, Sk, bounds)
    begin, end, full_low, full_high = walk(low, high, BLOCK_N)
    q = load_rows(q_ptr + b * q_b + a * q_a, i, q_s, Sq, D, BLOCK_D)
    dout = load_rows(dout_ptr + b * dout_b + a * dout_a, i, dout_s, Sq, DV, BLOCK_DV)
    lse = tl.load(lse_ptr + head * Sq + i, mask=i < Sq, other=0.0)
    delta = tl.load(delta_ptr + head * Sq + i, mask=i < Sq, other=0.0)
    k_ptr += b * k_b + a // GROUP * k_g
    v_ptr += b * v_b + a // GROUP * v_g
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        k = load_rows(k_ptr, j, k_s, Sk, D, BLOCK_D)
        v = load_rows(v_ptr, j, v_s, Sk, DV, BLOCK_DV)
        is_full = (full_low <= start) & (start < full_high)
        dq = _add_keys(dq, q, dout, k, v, lse, delta, low, high, j, is_full, SCALE, CAP)
    d = tl.arange(0, BLOCK_D)
    at = (i.to(tl.int64) * num_heads + head)[:, None] * D + d[None, :]
    tl.store(dq_ptr + at, dq * SCALE, mask=(i < Sq)[:, None] & (d < D)[None, :])


def backward(*inputs: Unpack[GivenToBackward]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and dsink of ``fused_attention``; dsink is empty if there is no sink."""
    dout, dlse, q, k, v, sink, out, lse, bounds, scale, softcap, left, right = GivenToBackward(*inputs)
    dq, dk, dv, dsink = OPERATOR.gradients(*inputs)
    (Sq, B, A, D), (Sk, _, G, DV) = q.shape, v.shape
    if out.numel() == 0 or Sk == 0:
        return dq.zero_(), dk.zero_(), dv.zero_(), dsink.zero_()
    dout = torch.zeros_like(out) if dout is None else contiguous_columns(dout)
    q, k, v = (contiguous_columns(x) for x in (q, k, v))
    bounds = None if bounds is None else bounds.contiguous()
    delta = torch.empty_like(lse)
    num_blocks = cdiv(Sq, _DELTA_ROWS)
    wrap_triton(_delta_kernel)[(num_blocks * B * A,)](
        dout, out, None if dlse is None else dlse.contiguous(), delta, *strides(dout), Sq, A, B * A, num_blocks,
        DV=DV, BLOCK_DV=block_columns(v), BLOCK_M=_DELTA_ROWS,
    )  # fmt: skip
    tensors, cap = (q, k, v, dout, lse, delta, bounds), cap_of(scale, softcap)
    columns = max(64, block_columns(q), block_columns(v))
    sizes = {"D": D, "DV": DV, "BLOCK_D": block_columns(q), "BLOCK_DV": block_columns(v)}
    blocks = blocks_of(q, columns, _KEYS_BLOCKS, _LARGE_KEYS_BLOCKS)
    num_blocks = cdiv(Sk, blocks.BLOCK_N)
    wrap_triton(_keys_kernel)[(num_blocks * B * G,)](
        *tensors, dk, dv, *strides(q, k, v, dout), Sq, Sk, G, B * G, num_blocks, left, right,
        SCALE=scale, CAP=cap, GROUP=A // G, **sizes, **blocks._asdict(),
    )  # fmt: skip
    blocks = blocks_of(q, columns, _QUERIES_BLOCKS, _LARGE_QUERIES_BLOCKS)
    num_blocks = cdiv(Sq, blocks.BLOCK_M)
    wrap_triton(_queries_kernel)[(num_blocks * B * A,)](
        *tensors, dq, *strides(q, k, v, dout), Sq, Sk, A, B * A, num_blocks, left, right,
        SCALE=scale, CAP=cap, GROUP=A // G, **sizes, **blocks._asdict(),
    )  # fmt: skip
    if sink is not None:  # the sink is a key with value 0: its share of the softmax, times -delta
        share = torch.exp(sink.to(torch.float32).unsqueeze(-1) - lse)  # [B, A, Sq]
        dsink = -(share * delta).sum(dim=(0, 2)).to(sink.dtype)
    return dq, dk, dv, dsink
