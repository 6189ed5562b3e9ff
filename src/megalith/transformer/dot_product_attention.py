"""Causal scaled dot-product attention over grouped heads, with packed documents and reproducible dropout.

    o = softmax(q k^T / sqrt(D) + mask) v

Without dropout it is torch's own kernel, once for the batch, or once for each document where documents are packed, so
that nothing of size S x S is ever made. With dropout it is spelled out, because torch's kernels draw their masks from a
generator, and a mask here is a function of (seed, step, layer, head, query, key).
"""

import torch
from torch import Tensor, nn

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
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [B, A or G, S, D]
    if packed_seq_params is None:
        out = _sdpa(q, k, v)
    else:
        rows = []
        for b, documents in enumerate(packed_seq_params.rows()):
            row = slice(b, b + 1)
            parts = [_sdpa(*(x[row, :, start:end] for x in (q, k, v))) for start, end in documents]
            rows.append(torch.cat(parts, dim=2))
        out = torch.cat(rows)
    return out.permute(2, 0, 1, 3)  # [S, B, A, D]


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


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    Sq, Sk = q.shape[2], k.shape[2]
    mask = None
    if 1 < Sq < Sk:  # torch's is_causal would let query i see the first i + 1 keys; a single query sees all
        mask = torch.ones(Sq, Sk, dtype=torch.bool, device=q.device).tril(Sk - Sq)
    gqa = q.shape[1] != k.shape[1]
    return nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=Sq == Sk, enable_gqa=gqa)
