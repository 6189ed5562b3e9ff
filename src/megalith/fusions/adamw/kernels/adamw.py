"""Triton kernel of fused_adamw: one launch for all tensors, whose addresses are in a table.

A program updates a chunk of one tensor. The table holds a column for each tensor: the addresses of its weight, copy,
gradient and moments, its size, and the index of its first chunk.
"""

from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalith.fusions.adamw.formulas import MUTATED, outputs
from megalith.fusions.core.grids import cdiv, next_power_of_2
from megalith.fusions.core.registration import register_without_gradient, wrap_triton

__all__ = ["op"]

_CHUNK = 8192  # elements per program; untuned
_BLOCK = tl.constexpr(1024)  # elements per step; untuned
_SEARCH = 1024  # tensors compared at a time when searching for the tensor of a chunk


@triton.jit
def _tensor_of(chunk, table_ptr, num_tensors, SEARCH: tl.constexpr):
    """The column of the last tensor that begins at or before ``chunk``."""
    count = 0
    for start in range(0, num_tensors, SEARCH):
        column = start + tl.arange(0, SEARCH)
        first = tl.load(table_ptr + 6 * num_tensors + column, mask=column < num_tensors, other=2**62)
        count += tl.sum((first <= chunk).to(tl.int32), axis=0)
    return count - 1


@triton.jit
def _address(entry_ptr, like, ALIGNED: tl.constexpr):
    """The address in an entry of the table, as a pointer to what ``like`` points to."""
    ptr = tl.load(entry_ptr).to(like.dtype)
    return tl.multiple_of(ptr, 16) if ALIGNED else ptr  # lets loads be 16 bytes wide


@triton.jit
def _update_block(
    w_ptr, copy_ptr, g_ptr, m_ptr, v_ptr, at, mask, scale, kept, rate, correction,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    g = tl.load(g_ptr + at, mask=mask).to(tl.float32) * scale
    m = tl.load(m_ptr + at, mask=mask)
    m += (1.0 - BETA1) * (g - m)
    v = BETA2 * tl.load(v_ptr + at, mask=mask) + (1.0 - BETA2) * g * g
    w = kept * tl.load(w_ptr + at, mask=mask) - rate * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), correction) + EPS)
    tl.store(m_ptr + at, m, mask=mask)
    tl.store(v_ptr + at, v, mask=mask)
    tl.store(w_ptr + at, w, mask=mask)
    if copy_ptr is not None:
        tl.store(copy_ptr + at, w, mask=mask)


@triton.jit
def _adamw_kernel(
    table_ptr, num_tensors, like_weight, like_copy, like_grad, grad_scale_ptr, found_nonfinite_ptr,
    kept, rate, correction,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """w = kept * w - rate * m / (sqrt(v) / correction + eps)."""
    chunk = tl.program_id(0).to(tl.int64)
    entry_ptr = table_ptr + _tensor_of(chunk, table_ptr, num_tensors, SEARCH)
    w_ptr = _address(entry_ptr, like_weight, ALIGNED)
    copy_ptr = None if like_copy is None else _address(entry_ptr + num_tensors, like_copy, ALIGNED)
    g_ptr = _address(entry_ptr + 2 * num_tensors, like_grad, ALIGNED)
    m_ptr = _address(entry_ptr + 3 * num_tensors, like_weight, ALIGNED)
    v_ptr = _address(entry_ptr + 4 * num_tensors, like_weight, ALIGNED)
    start = (chunk - tl.load(entry_ptr + 6 * num_tensors)) * CHUNK
    size = tl.load(entry_ptr + 5 * num_tensors)
    end = tl.minimum(start + CHUNK, size)
    if found_nonfinite_ptr is not None:
        end = tl.where(tl.load(found_nonfinite_ptr) == 0.0, end, start)  # nothing is left to update
    scale = 1.0 if grad_scale_ptr is None else tl.load(grad_scale_ptr)
    rest = start + (end - start) // _BLOCK * _BLOCK
    for begin in range(start, rest, _BLOCK):  # without a mask, so that 16 bytes are loaded at once for any size
        at = begin + tl.arange(0, _BLOCK)
        _update_block(w_ptr, copy_ptr, g_ptr, m_ptr, v_ptr, at, None, scale, kept, rate, correction, BETA1, BETA2, EPS)
    at = rest + tl.arange(0, _BLOCK)
    _update_block(w_ptr, copy_ptr, g_ptr, m_ptr, v_ptr, at, at < end, scale, kept, rate, correction, BETA1, BETA2, EPS)


def _update(
    weights: list[Tensor],
    copies: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    settings: list[float],
    grad_scale: Tensor | None,
    found_nonfinite: Tensor | None,
) -> None:
    lr, beta1, beta2, eps, decay, step = settings
    grads = [grad.contiguous() for grad in grads]
    lists = (weights, copies or weights, grads, exp_avgs, exp_avg_sqs)  # the table has this row even without copies
    addresses = [[tensor.data_ptr() for tensor in tensors] for tensors in lists]
    sizes = [w.numel() for w in weights]
    *first, num_chunks = accumulate((cdiv(size, _CHUNK) for size in sizes), initial=0)
    if num_chunks == 0:
        return
    # one small copy, without a host sync
    table = torch.tensor([*addresses, sizes, first], dtype=torch.int64).to(weights[0].device, non_blocking=True)
    wrap_triton(_adamw_kernel)[(num_chunks,)](
        table, len(weights), weights[0], copies[0] if copies else None, grads[0], grad_scale, found_nonfinite,
        1 - lr * decay, lr / (1 - beta1**step), (1 - beta2**step) ** 0.5,
        BETA1=beta1, BETA2=beta2, EPS=eps, ALIGNED=all(address % 16 == 0 for row in addresses for address in row),
        CHUNK=_CHUNK, SEARCH=min(_SEARCH, next_power_of_2(len(weights))),
    )  # fmt: skip


# opaque even where kernels are compiled: tensor addresses are not known while torch.compile traces
op = register_without_gradient("adamw_", _update, outputs, mutates=MUTATED, opaque=True)
