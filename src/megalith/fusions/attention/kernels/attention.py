"""Triton kernel of fused_attention, forward: one program per block of queries of one head.

It loops over the keys that its queries see with an online softmax: the running maximum m, the sum of exp(s - m), and
acc, the sum of exp(s - m) v. Logarithms are base 2 inside, and natural in lse.

q [Sq, B, A, D], k [Sk, B, G, D], v [Sk, B, G, Dv]; rows may be strided, columns are contiguous.
"""

# ruff: noqa: UP044  a starred annotation would iterate over the NamedTuple class, which raises TypeError

import math
from typing import Unpack

import triton
import triton.language as tl
from torch import Tensor

from megalith.fusions.attention.formulas import OPERATOR, Seen
from megalith.fusions.attention.kernels.attention_backward import LOG2_E, backward
from megalith.fusions.attention.kernels.attention_tiles import (
    Blocks,
    block_columns,
    blocks_of,
    cap_of,
    capped,
    interval,
    load_rows,
    strides,
    walk,
)
from megalith.fusions.core.grids import cdiv
from megalith.fusions.core.registration import wrap_triton
from megalith.fusions.core.rows import contiguous_columns

__all__ = ["op"]

LN_2 = tl.constexpr(math.log(2.0))

# untuned, except for 2 bytes and up to 128 columns; keys are (bytes per element, largest number of columns)
_BLOCKS = {
    (2, 64): Blocks(128, 64, 8, 3),
    (2, 128): Blocks(128, 64, 8, 2),
    (2, 256): Blocks(64, 32, 8, 2),
    (4, 64): Blocks(64, 32, 4, 2),
    (4, 128): Blocks(32, 16, 4, 1),
    (4, 256): Blocks(32, 16, 8, 1),
}
# from sweeps on an H100 and an H200, where they are 1.3 and 1.7 to 2.3 times as fast
_LARGE_BLOCKS = {(2, 128): Blocks(128, 128, 8, 3), (2, 256): Blocks(128, 64, 8, 2)}


@triton.jit
def _meet(acc, m, total, q, k, v, low, high, j, is_full, SCALE: tl.constexpr, CAP: tl.constexpr):
    """The softmax after the keys ``j`` [N] too."""
    s = capped(tl.dot(q, tl.trans(k), input_precision="ieee"), CAP)  # [M, N]
    if not is_full:
        s = tl.where((low[:, None] <= j[None, :]) & (j[None, :] < high[:, None]), s, float("-inf"))
    new_m = tl.maximum(m, tl.max(s, axis=1) * (SCALE * LOG2_E))
    shift = tl.where(new_m == float("-inf"), 0.0, new_m)  # nothing met yet: exp(-inf - 0) is 0, as it must be
    p = tl.exp2(s * (SCALE * LOG2_E) - shift[:, None])
    rest = tl.exp2(m - shift)
    acc = tl.dot(p.to(v.dtype), v, acc * rest[:, None], input_precision="ieee")
    return acc, new_m, total * rest + tl.sum(p, axis=1)


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, sink_ptr, bounds_ptr, out_ptr, lse_ptr,
    q_s, q_b, q_a, k_s, k_b, k_g, v_s, v_b, v_g, Sq, Sk, A, num_heads, num_blocks, before, after,
    SCALE: tl.constexpr, CAP: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    head = (program // num_blocks).to(tl.int64)  # of all B * A; its blocks run together and share k and v in cache
    block = num_blocks - 1 - program % num_blocks  # under the causal rule the last has most to do
    b, a = head // A, head % A
    i = block * BLOCK_M + tl.arange(0, BLOCK_M)
    bounds = None if bounds_ptr is None else bounds_ptr + b * 2 * Sq
    low, high = interval(i, Sq, Sk - Sq, before, after, Sk, bounds)
    begin, end, full_low, full_high = walk(low, high, BLOCK_N)
    q = load_rows(q_ptr + b * q_b + a * q_a, i, q_s, Sq, D, BLOCK_D)
    k_ptr += b * k_b + a // GROUP * k_g
    v_ptr += b * v_b + a // GROUP * v_g
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    if sink_ptr is not None:  # a key that is met first, and has no value
        m = tl.zeros([BLOCK_M], tl.float32) + tl.load(sink_ptr + a).to(tl.float32) * LOG2_E
        total = tl.where(m == float("-inf"), 0.0, 1.0)
    for start in range(begin, end, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        k = load_rows(k_ptr, j, k_s, Sk, D, BLOCK_D)
        v = load_rows(v_ptr, j, v_s, Sk, DV, BLOCK_DV)
        is_full = (full_low <= start) & (start < full_high)
        acc, m, total = _meet(acc, m, total, q, k, v, low, high, j, is_full, SCALE, CAP)
    column = tl.arange(0, BLOCK_DV)
    total = tl.where(total == 0.0, 1.0, total)  # nothing was met: out is 0, and lse stays -inf
    out = acc / total[:, None]
    at = (i.to(tl.int64) * num_heads + head)[:, None] * DV + column[None, :]
    tl.store(out_ptr + at, out, mask=(i < Sq)[:, None] & (column < DV)[None, :])
    tl.store(lse_ptr + head * Sq + i, (m + tl.log2(total)) * LN_2, mask=i < Sq)


def _forward(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *seen: Unpack[Seen]) -> tuple[Tensor, Tensor]:
    bounds, scale, softcap, left, right = seen
    out, lse = OPERATOR.outputs(q, k, v, sink, *seen)
    (Sq, B, A, D), Sk, DV = q.shape, k.shape[0], v.shape[-1]
    if out.numel() == 0:
        return out, lse
    q, k, v = (contiguous_columns(x) for x in (q, k, v))
    columns = max(64, block_columns(q), block_columns(v))
    blocks = blocks_of(q, columns, _BLOCKS, _LARGE_BLOCKS)
    num_blocks = cdiv(Sq, blocks.BLOCK_M)
    wrap_triton(_forward_kernel)[(num_blocks * B * A,)](
        q, k, v, None if sink is None else sink.contiguous(), None if bounds is None else bounds.contiguous(), out, lse,
        *strides(q, k, v), Sq, Sk, A, B * A, num_blocks, left, right,
        SCALE=scale, CAP=cap_of(scale, softcap), GROUP=A // k.shape[2], D=D, DV=DV,
        BLOCK_D=block_columns(q), BLOCK_DV=block_columns(v), **blocks._asdict(),
    )  # fmt: skip
    return out, lse


op = OPERATOR.register("attention", _forward, backward)
