"""Attention with every score in memory, for what no fused operation has: a bias with a gradient, our dropout.

    o = dropout(softmax(s + bias + mask)) v,   s = scale q k^T, or c tanh(scale q k^T / c) with a softcap c

Kernels draw dropout masks from the state of a generator, and ours must be a function of (seed, step, name, head, query,
key). A query that sees no key has o = 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.numerics.dropout import Dropout, attention_dropout

__all__ = ["Scores", "attend"]


@dataclass(frozen=True, eq=False)
class Scores:
    """How scores are made of q k^T.

    Attributes:
        scale: the factor; None: 1 / sqrt(D).
        softcap: c, before the bias; None: none.
        bias: [A, Sq, Sk], added.
        sink: [A], a score in every softmax of the head that has no value.
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
    """Attention over the keys that each query has ``seen``.

    Args:
        q: [Sq, B, A, D].
        k, v: [Sk, B, G, D], A divisible by G.
        scores_as: what becomes of q k^T.
        seen: bool [1 or B, 1, Sq, Sk].
        dropout: of probabilities; its key's tokens are [B, Sq].
        head_offset: this rank's first head among all heads, whose masks differ.

    Returns:
        [Sq, B, A, D].
    """
    (Sq, B, A, D), Sk = q.shape, k.shape[0]
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [B, A or G, S, D]
    if k.shape[1] != A:
        k, v = (x.repeat_interleave(A // x.shape[1], dim=1) for x in (k, v))
    scale = D**-0.5 if scores_as.scale is None else scores_as.scale
    scores = q @ k.transpose(2, 3)  # [B, A, Sq, Sk]
    scores = (scores if scale == 1.0 else scores * scale).to(wide)
    if scores_as.softcap is not None:
        scores = scores_as.softcap * torch.tanh(scores / scores_as.softcap)
    blind = ~seen.any(dim=-1, keepdim=True)  # a softmax over nothing is NaN, and so is its gradient
    hidden = ~(seen | blind)
    if scores_as.bias is not None and hidden.shape[0] == 1:  # of all sequences alike: B times fewer to fill
        scores = scores + scores_as.bias.masked_fill(hidden, float("-inf"))
    else:
        scores = scores if scores_as.bias is None else scores + scores_as.bias
        scores = scores.masked_fill(hidden, float("-inf"))
    if scores_as.sink is not None:  # a key without a value
        sink = scores_as.sink.to(wide).view(A, 1, 1).expand(B, A, Sq, 1)
        scores = torch.cat((scores, sink), dim=-1)  # [B, A, Sq, Sk + 1]
    probs = torch.softmax(scores, dim=-1)[..., :Sk]
    if dropout is not None:
        assert dropout.key is not None, "a dropout site gives one"
        probs = attention_dropout(probs, dropout.p, dropout.key, head_offset)
    out = (probs.to(v.dtype) @ v).masked_fill_(blind, 0.0)
    return out.permute(2, 0, 1, 3)  # [Sq, B, A, D]
