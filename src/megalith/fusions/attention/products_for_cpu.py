"""Gradients of attention over short rows or documents on a CPU: products of all queries and keys, a few heads at a time.

    P  = exp(scale q k^T - lse)                 dv = P^T dout
    dS = scale P (dout v^T - delta + dlse)      dq = dS k,  dk = dS^T q         delta = sum over D of dout out

torch's kernel multiplies tiles of only 32 queries in rows below 192. Here the first two products are in float32, since
P and dS need its digits, and with AMX the others are in bfloat16, with P and dS rounded, as in torch's kernel.

Tensors are reshaped to [B G, S, D], one matrix per key head. The R query heads of a group are stacked: [B G, R S, D].
"""

import torch
from torch import Tensor

__all__ = ["gradients_by_products"]

_ELEMENTS = 1 << 19  # of P at a time, unless one head has more: two megabytes, about a core's L2 cache


def gradients_by_products(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float,
    *, causal: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv as [B, heads, S, D]; the last three products are computed in ``dtype``.

    Args:
        dout: [S, B, A, Dv]; so is ``out``.
        dlse: [B, A, S] or None; ``lse`` [B, A, S] is finite.
        q: [S, B, A, D].
        k: [Sk, B, G, D]; v [Sk, B, G, Dv].
        scale: the factor of the scores.
        causal: whether query i sees keys up to i, of as many as there are queries.
        dtype: float32, or that of the inputs.
    """
    (S, B, A, D), (Sk, _, G, Dv), R = q.shape, v.shape, q.shape[2] // k.shape[2]
    delta = (dout.float() * out.float()).sum(dim=-1).permute(1, 2, 0)  # [B, A, S]
    delta = delta if dlse is None else delta - dlse
    scaled_delta, lse = (x.reshape(B * G, R * S, 1) for x in (scale * delta, lse.float()))
    rows = [_rows(x, G) for x in (q, k, v, dout)]
    dq, dk, dv = (x.new_empty(x.shape, dtype=dtype) for x in rows[:3])
    most = max(1, _ELEMENTS // (R * S * Sk))
    # memory is reused, because fresh memory costs as much time as what is computed in it
    wide = [torch.empty_like(x[:most], dtype=torch.float32) for x in rows]
    of_scores = [q.new_empty(2, most, R * S, Sk, dtype=each) for each in (torch.float32, dtype)]
    for heads in (slice(first, min(first + most, B * G)) for first in range(0, B * G, most)):
        num = heads.stop - heads.start
        own = [x[heads] for x in rows]
        wide_q, wide_k, wide_v, wide_dout = (_cast(x, memory[:num]) for x, memory in zip(own, wide, strict=True))
        own_q, own_k, _, own_dout = own if dtype == q.dtype else (wide_q, wide_k, wide_v, wide_dout)
        p, ds = of_scores[0][:, :num]
        p.baddbmm_(wide_q, wide_k.mT, beta=0.0, alpha=scale).sub_(lse[heads]).exp_()
        if causal:
            p.unflatten(1, (R, S)).tril_()
        ds.baddbmm_(wide_dout, wide_v.mT, beta=0.0, alpha=scale).sub_(scaled_delta[heads]).mul_(p)
        p, ds = (_cast(x, memory[:num]) for x, memory in zip((p, ds), of_scores[1], strict=True))
        torch.bmm(p.mT, own_dout, out=dv[heads])
        torch.bmm(ds, own_k, out=dq[heads])
        torch.bmm(ds.mT, own_q, out=dk[heads])
    return dq.view(B, A, S, D), dk.view(B, G, Sk, D), dv.view(B, G, Sk, Dv)


def _cast(x: Tensor, memory: Tensor) -> Tensor:
    """``x`` in the dtype of ``memory``, which holds the result unless it is ``x`` itself."""
    return x if x.dtype == memory.dtype else memory.copy_(x)


def _rows(x: Tensor, G: int) -> Tensor:
    """[B G, R S, D] of ``x`` [S, B, R G, D]."""
    S, B, heads, D = x.shape
    return x.permute(1, 2, 0, 3).reshape(B * G, heads // G * S, D)
