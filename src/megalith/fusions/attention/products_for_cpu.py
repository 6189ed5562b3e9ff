"""Attention over rows or documents on a CPU by products of queries and keys, some heads at a time, and its gradients.

    P  = softmax(scale q k^T)            out = P v                   lse = max of a row of scores - log(max of P)
    dP = dout v^T                        dv = P^T dout               delta = sum over keys of P dP
    dS = scale P (dP - delta + dlse)     dq = dS k,  dk = dS^T q

torch's softmax and its gradient go over a row of scores while it is in cache, and delta has no rounding error of out.
A sink, or keys outside this call, are part of lse and of out. Then P = exp(scale q k^T - lse), delta = sum over D of
dout out. With this P the other delta would be inexact: the sum of P differs from 1 by the rounding of lse.

torch's kernel multiplies tiles of only 32 queries in rows below 192, and of 64 below 768. Causal rows are computed in
blocks of queries, each with the keys up to its last query, which leaves out up to half of the work.

All products have float32 results, since the softmax, P and dS need its digits and dk and dv are sums over blocks. torch
has no such product of bfloat16 tensors on a CPU, but one of float32 tensors in which oneDNN may round the operands to
bfloat16, which changes nothing in q, k, v and dout. With AMX it does; on Zen 5 it takes its own float32 product, which
is twice as fast as MKL's there. It is a setting of the process: meanwhile, it holds for other threads as well,
and attention is computed in one thread after the other. Otherwise operands are not rounded, whatever the user has set.

Tensors are viewed as [B G, R, S, D], with the R query heads of a key head; products take them stacked: [B G, R S, D].
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any, Literal

import torch
from torch import Tensor

__all__ = ["attention_by_products", "gradients_by_products", "queries_at_a_time"]

_ELEMENTS = 1 << 20  # of P and of dS at a time, unless one head has more; about the fastest on two cores
_PRECISION = Lock()  # held while the setting of the process is changed
_QUERIES = 128  # in a block of a causal row; the fastest of 64, 128 and 256 in float32, and about that in bfloat16

_aten: Any = torch.ops.aten


def attention_by_products(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool, rounded: bool
) -> tuple[Tensor, Tensor]:
    """out as [B, A, S, Dv] in the dtype of ``q``, in the memory of [S, B, A, Dv], and lse [B, A, S] in float32.

    The arguments are those of ``gradients_by_products``.
    """
    (S, B, A, _), (Sk, _, G, Dv) = q.shape, v.shape
    given = [_by_key_head(x, G) for x in (q, k, v)]
    out, lse = q.new_empty(S, B, A, Dv), q.new_empty(B * G, A // G, S, dtype=torch.float32)
    block = queries_at_a_time(S, causal=causal)
    most = _most_key_heads(given[0], block * Sk)
    wide = _memory_in_float32(given, most)
    scores = q.new_empty(most * A // G * block * Sk, dtype=torch.float32)
    for heads in _parts(B * G, most):
        operands = [_widened(x[heads], memory) for x, memory in zip(given, wide, strict=True)]
        with _operands_in("bf16" if rounded else "ieee"):
            _attend_(operands, scale, scores, (_by_key_head(out, G)[heads], lse[heads]), block, causal=causal)
    return out.permute(1, 2, 0, 3), lse.view(B, A, S)


def gradients_by_products(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out_and_lse: tuple[Tensor, Tensor] | None,
    scale: float, *, causal: bool, rounded: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv as [B, heads, S, D] in the dtype of ``q``.

    Args:
        dout: [S, B, A, Dv].
        dlse: [B, A, S] or None.
        q: [S, B, A, D], of at most 32 bits.
        k: [Sk, B, G, D]; v [Sk, B, G, Dv].
        out_and_lse: [S, B, A, Dv] and finite [B, A, S], if they cover more than ``k``: a sink, or other keys.
        scale: the factor of the scores.
        causal: whether query i sees keys up to i, of as many as there are queries.
        rounded: let oneDNN round the operands of products to bfloat16.
    """
    (S, B, A, D), (Sk, _, G, Dv), R = q.shape, v.shape, q.shape[2] // k.shape[2]
    lse, added = None, dlse  # to dP
    if out_and_lse is not None:
        out, lse = out_and_lse[0], out_and_lse[1].float().reshape(B * G, R, S, 1)
        delta = (dout.float() * out.float()).sum(dim=-1).permute(1, 2, 0)  # [B, A, S]
        added = -delta if dlse is None else dlse - delta
    added = None if added is None else (scale * added.float()).reshape(B * G, R, S, 1)
    given = [_by_key_head(x, G) for x in (q, dout, k, v)]
    dq, dk, dv = (x.new_empty(x.shape) for x in (given[0], *given[2:]))
    block = queries_at_a_time(S, causal=causal)
    most = _most_key_heads(given[0], block * Sk)
    # memory is reused, because fresh memory costs as much time as what is computed in it
    wide, sums = _memory_in_float32(given, most), _memory_in_float32((dk, dv), most)
    scores = q.new_empty(2, most * R * block * Sk, dtype=torch.float32)
    for heads in _parts(B * G, most):
        operands = [_widened(x[heads], memory) for x, memory in zip(given, wide, strict=True)]
        own_lse, own_added = (None if x is None else x[heads] for x in (lse, added))
        own = [x[heads] for x in (dk, dv)]
        summed = own if q.dtype == torch.float32 else [x[: len(own[0])] for x in sums]
        with _operands_in("bf16" if rounded else "ieee"):
            _gradients_(operands, own_lse, own_added, scale, scores, (dq[heads], *summed), block, causal=causal)
        if summed is not own:
            torch._foreach_copy_(own, summed)
    return dq.view(B, A, S, D), dk.view(B, G, Sk, D), dv.view(B, G, Sk, Dv)


def queries_at_a_time(S: int, *, causal: bool) -> int:
    """How many of S queries of a head have their scores in memory at once."""
    return min(S, _QUERIES) if causal else S


def _attend_(
    operands: Sequence[Tensor], scale: float, scores: Tensor, results: tuple[Tensor, Tensor], block: int, *,
    causal: bool,
) -> None:  # fmt: skip
    """Writes out and lse of a few key heads to ``results``; the arguments are those of ``_gradients_``."""
    q, (k, v) = operands[0], (x.squeeze(1) for x in operands[1:])
    out, lse = results
    num, R, S, _ = q.shape
    for first in range(0, S, block):
        after = min(first + block, S)
        seen = after if causal else k.shape[1]
        p = scores[: num * R * (after - first) * seen].view(num, -1, seen)
        _scores_(p, q[:, :, first:after], k[:, :seen].contiguous(), scale, causal=causal)
        largest = p.amax(dim=-1)
        _scores_to_probabilities_(p, None)
        lse[:, :, first:after] = (largest - p.amax(dim=-1).log_()).unflatten(1, (R, -1))
        out[:, :, first:after] = torch.bmm(p, v[:, :seen].contiguous()).unflatten(1, (R, -1))


def _gradients_(
    operands: Sequence[Tensor], lse: Tensor | None, added: Tensor | None, scale: float, scores: Tensor,
    results: Sequence[Tensor], block: int, *, causal: bool,
) -> None:  # fmt: skip
    """Writes the gradients of a few key heads to ``results``.

    Args:
        operands: float32 q, dout, k and v.
        lse: [key heads, R, S, 1], or None for a softmax of the scores.
        added: to scale dP, [key heads, R, S, 1] or None.
        scores: memory for P and dS of a block, [2, at least as many elements].
        results: dq, and float32 dk and dv.
        block: queries at a time; all of them unless ``causal``.
    """
    (q, dout), (k, v) = operands[:2], (x.squeeze(1) for x in operands[2:])
    dq, dk, dv = results[0], *(x.squeeze(1) for x in results[1:])
    num, R, S, _ = q.shape
    for first in reversed(range(0, S, block)):  # the last block sees all keys, so its products initialize dk and dv
        after = min(first + block, S)
        seen, kept = (after if causal else k.shape[1]), float(after < S)
        own_q, own_dout = (x[:, :, first:after].flatten(1, 2) for x in (q, dout))
        own_lse, own_added = (None if x is None else x[:, :, first:after].flatten(1, 2) for x in (lse, added))
        keys, values = k[:, :seen].contiguous(), v[:, :seen].contiguous()  # else torch copies their transposes
        p, ds = (memory[: num * R * (after - first) * seen].view(num, -1, seen) for memory in scores)
        _scores_(p, q[:, :, first:after], keys, scale, causal=causal)
        _scores_to_probabilities_(p, own_lse)
        ds.baddbmm_(own_dout, values.mT, beta=0.0, alpha=scale)
        _to_score_gradients_(ds, p, own_added, normalized=own_lse is None)
        dv[:, :seen].baddbmm_(p.mT, own_dout, beta=kept)
        dk[:, :seen].baddbmm_(ds.mT, own_q, beta=kept)
        dq[:, :, first:after] = torch.bmm(ds, keys).unflatten(1, (R, -1))


def _scores_(scores: Tensor, q: Tensor, keys: Tensor, scale: float, *, causal: bool) -> None:
    """Writes scale q k^T to ``scores`` [key heads, R queries, keys]; ``q`` [key heads, R, queries, D]."""
    scores.baddbmm_(q.flatten(1, 2), keys.mT, beta=0.0, alpha=scale)
    if causal:  # the last key is that of the last query; hidden before the softmax, which normalizes
        S = q.shape[2]
        later = torch.ones(S, S, dtype=torch.bool).triu_(1)
        scores.view(-1, S, keys.shape[1])[..., -S:].masked_fill_(later, -torch.inf)  # a sum would keep NaN and inf


def _scores_to_probabilities_(scores: Tensor, lse: Tensor | None) -> None:
    """exp(scores - lse), or their softmax; ``scores`` are contiguous, since torch's operator is wrong for others."""
    if lse is None:
        _aten._softmax.out(scores, -1, False, out=scores)
    else:
        scores.sub_(lse).exp_()


def _to_score_gradients_(dp: Tensor, p: Tensor, added: Tensor | None, *, normalized: bool) -> None:
    """Replaces ``dp``, contiguous, by p (dp - sum of p dp + added), or p (dp + added) if p is not ``normalized``."""
    if normalized:
        _aten._softmax_backward_data.out(dp, p, -1, dp.dtype, grad_input=dp)
        if added is not None:
            dp.addcmul_(p, added)
    else:
        assert added is not None, "without a sum over p, delta is part of what is added"
        dp.add_(added).mul_(p)


@contextmanager
def _operands_in(precision: Literal["bf16", "ieee"]) -> Iterator[None]:
    """Inside the ``with`` block, which one thread enters at a time, operands of float32 products have ``precision``."""
    onednn: Any = torch.backends.mkldnn  # its type does not know its settings
    with _PRECISION:
        before = onednn.matmul.fp32_precision
        inherited = before == onednn.fp32_precision  # or set to the same; torch does not tell these apart
        onednn.matmul.fp32_precision = precision
        try:
            yield
        finally:
            onednn.matmul.fp32_precision = "none" if inherited else before


def _by_key_head(x: Tensor, G: int) -> Tensor:
    """``x`` [S, B, heads, D] as [B G, heads per key head, S, D]; a view of a contiguous tensor."""
    S, B, _, D = x.shape
    return x.permute(1, 2, 0, 3).reshape(B * G, -1, S, D)


def _most_key_heads(q: Tensor, num_scores: int) -> int:
    """How many of the key heads of ``q`` [B G, R, S, D] to compute at a time, with ``num_scores`` of a query head."""
    return min(len(q), max(1, _ELEMENTS // (q.shape[1] * num_scores)))


def _parts(length: int, most: int) -> Iterator[slice]:
    return (slice(first, first + most) for first in range(0, length, most))


def _memory_in_float32(tensors: Sequence[Tensor], most: int) -> list[Tensor]:
    """Memory for the first ``most`` of each of ``tensors`` in float32; empty for those that are float32."""
    return [x.new_empty((0 if x.dtype == torch.float32 else most, *x.shape[1:]), dtype=torch.float32) for x in tensors]


def _widened(x: Tensor, memory: Tensor) -> Tensor:
    """``x`` in float32, in ``memory`` unless it is that already."""
    return x if x.dtype == torch.float32 else memory[: len(x)].copy_(x)
