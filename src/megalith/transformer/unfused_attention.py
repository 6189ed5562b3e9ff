"""Attention that materializes the scores, for what the fused operation lacks: a bias with a gradient, our dropout.

    o = dropout(softmax(s + bias + mask)) v,   s = scale q k^T, or c tanh(scale q k^T / c) with a softcap c

Fused kernels draw dropout masks from a generator's state; ours must be functions of (seed, step, name, head, query,
key). A query that sees no key has o = 0.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megalith.numerics.dropout import Dropout, attention_dropout

__all__ = ["Scores", "attend"]


@dataclass(frozen=True, eq=False)
class Scores:
    """How scores are computed from q k^T.

    Attributes:
        scale: the factor; None: 1 / sqrt(D).
        softcap: c, applied before the bias; None: no capping.
        bias: [A, Sq, Sk], added.
        sink: [A], an additional score without a value in every softmax of the head.
    """

    scale: float | None = None
    softcap: float | None = None
    bias: Tensor | None = None
    sink: Tensor | None = None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores_as: Scores,
    seen: Tensor,
    *,
    dropout: Dropout | None = None,
    head_offset: int = 0,
) -> Tensor:
    """Computes attention of each query over the keys that it sees.

    Args:
        q: [Sq, B, A, D].
        k, v: [Sk, B, G, D], A divisible by G.
        scores_as: how scores are computed from q k^T.
        seen: bool [1 or B, 1, Sq, Sk], True where the query sees the key.
        dropout: of attention probabilities; the tokens of its key are [B, Sq].
        head_offset: global index of this rank's first head; heads have different dropout masks.

    Returns:
        [Sq, B, A, D].
    """
    (Sq, B, A, D), (Sk, _, G, _) = q.shape, k.shape
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [B, A or G, S, D]
    # the heads of a group are rows of one product, so that keys and values are not repeated
    q = q.reshape(B * G, A // G * Sq, D)
    k, v = (x.reshape(B * G, Sk, x.shape[-1]) for x in (k, v))
    scores = _scores(q, k, D**-0.5 if scores_as.scale is None else scores_as.scale).view(B, A, Sq, Sk)
    if scores_as.softcap is not None:
        scores = scores_as.softcap * torch.tanh(scores / scores_as.softcap)
    blind = ~seen.any(dim=-1, keepdim=True)  # a softmax over no keys is NaN, and so is its gradient
    hidden = ~(seen | blind)
    if scores_as.bias is not None and hidden.shape[0] == 1:  # the same mask for all rows: B times fewer to fill
        scores = scores + scores_as.bias.masked_fill(hidden, float("-inf"))
    else:
        scores = scores if scores_as.bias is None else scores + scores_as.bias
        scores = scores.masked_fill(hidden, float("-inf"))
    if scores_as.sink is not None:  # a key without a value
        sink = scores_as.sink.to(scores.dtype).view(A, 1, 1).expand(B, A, Sq, 1)
        scores = torch.cat((scores, sink), dim=-1)  # [B, A, Sq, Sk + 1]
    probs = torch.softmax(scores, dim=-1)[..., :Sk]
    if dropout is not None:
        assert dropout.key is not None, "set by DropoutSite"
        probs = attention_dropout(probs, dropout.p, dropout.key, head_offset)
    out = probs.to(v.dtype).reshape(B * G, A // G * Sq, Sk) @ v
    out = out.view(B, A, Sq, -1).masked_fill_(blind, 0.0)
    return out.permute(2, 0, 1, 3)  # [Sq, B, A, D]


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Returns scale q k^T in float32 or wider, for q [N, R, D] and k [N, Sk, D] -> [N, R, Sk]."""
    if q.dtype.itemsize < 4:
        scores: Tensor = _WideScores.apply(q, k, scale)
        return scores
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32))  # under autocast the product is narrower
    return scores if scale == 1.0 else scores * scale


class _WideScores(Function):
    """Scores of 16-bit q and k that are not rounded to 16 bits, in which they may overflow before they are scaled."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, k: Tensor, scale: float) -> Tensor:
        scores = _wide_product(q, k)
        return scores if scale == 1.0 else scores * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        q, k, ctx.scale = inputs
        ctx.save_for_backward(q, k)
        ctx.save_for_forward(q, k)

    @staticmethod
    def backward(ctx: Any, dscores: Tensor) -> tuple[Tensor, Tensor, None]:
        q, k = ctx.saved_tensors
        dproduct = (dscores if ctx.scale == 1.0 else dscores * ctx.scale).to(q.dtype)
        return torch.bmm(dproduct, k), torch.bmm(dproduct.mT, q), None

    @staticmethod
    def jvp(ctx: Any, dq: Tensor | None, dk: Tensor | None, _: None) -> Tensor | None:
        q, k = ctx.saved_tensors
        parts = [_wide_product(x, y) for x, y in ((dq, k), (q, dk)) if x is not None and y is not None]
        return ctx.scale * sum(parts[1:], start=parts[0]) if parts else None


def _wide_product(q: Tensor, k: Tensor) -> Tensor:
    """Returns q k^T in float32, for 16-bit q [N, R, D] and k [N, Sk, D]."""
    if q.device.type == "cuda":
        return torch.bmm(q, k.mT, out_dtype=torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        return torch.bmm(q.float(), k.float().mT)
