"""Causal scaled dot-product attention over grouped heads, with packed documents and reproducible dropout.

    o = softmax(q k^T / sqrt(D) + mask) v

Without dropout it is the fused operation, and nothing of size S x S is ever made (but in float64, whose path is the
reference). With dropout it is spelled out, because kernels draw their masks from a generator, and a mask here is a
function of (seed, step, layer, head, query, key).
"""

import torch
from torch import Tensor

from megalith.fusions.fused_attention import fused_attention
from megalith.numerics.dropout import DropoutKey, attention_dropout
from megalith.packed_seq_params import PackedSeqParams

__all__ = ["dot_product_attention", "dot_product_attention_with_dropout"]


def dot_product_attention(q: Tensor, k: Tensor, v: Tensor, packed_seq_params: PackedSeqParams | None) -> Tensor:
    """Causal attention of the last Sq of Sk positions.

    Args:
        q: [Sq, B, A, D]; Sq < Sk after a cache of keys and values.
        k, v: [Sk, B, G, D], A divisible by G; query head a reads group a // (A / G).
        packed_seq_params: where documents begin; tokens see their own document only.

    Returns:
        [Sq, B, A, D].
    """
    out, _ = fused_attention(q, k, v, packed_seq_params=packed_seq_params)
    return out


def dot_product_attention_with_dropout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed_seq_params: PackedSeqParams | None,
    p: float,
    key: DropoutKey,
    head_offset: int,
) -> Tensor:
    """``dot_product_attention`` for training with dropout ``p`` on the probabilities, Sq = Sk.

    ``key.tokens`` is [B, S]; ``head_offset`` is this rank's first head among all heads.
    """
    S, _, A, D = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [B, A or G, S, D]
    k, v = (x.repeat_interleave(A // x.shape[1], dim=1) for x in (k, v))
    visible = torch.ones(S, S, dtype=torch.bool, device=q.device).tril()
    if packed_seq_params is not None:
        documents = packed_seq_params.document_ids().to(q.device)  # [B, S]
        visible = visible & (documents.unsqueeze(2) == documents.unsqueeze(1)).unsqueeze(1)  # [B, 1, S, S]
    scores = (q @ k.transpose(2, 3) * D**-0.5).to(wide).masked_fill(~visible, float("-inf"))  # [B, A, S, S]
    probs = attention_dropout(torch.softmax(scores, dim=-1), p, key, head_offset)
    return (probs.to(v.dtype) @ v).permute(2, 0, 1, 3)  # [S, B, A, D]
