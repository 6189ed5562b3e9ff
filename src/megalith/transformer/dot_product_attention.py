"""Scaled dot-product attention over grouped heads, under any mask, with packed documents and reproducible dropout.

    o = softmax(s + mask) v,   s = q k^T / sqrt(D), or scale q k^T, or c tanh(scale q k^T / c) with a softcap c

Without dropout this is ``fused_attention``, which never materialises the S x S scores, except on the reference path of
float64. With dropout, and with a bias of relative positions, which has a gradient, they are: ``spelled_out_attention``.
"""

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megalith.acceleration.replay import called_whole
from megalith.errors import ConfigError, ShapeError
from megalith.fusions import fused_attention
from megalith.numerics.dropout import Dropout
from megalith.packed_seq_params import PackedSeqParams
from megalith.parallel.context.attention import ContextMethod, context_attention
from megalith.transformer.attention_mask import BIDIRECTIONAL, CAUSAL, AttentionMask
from megalith.transformer.dropout import DropoutSite
from megalith.transformer.layer_context import LayerContext
from megalith.transformer.spelled_out_attention import Scores, attend

__all__ = ["DotProductAttention"]

_attention_by_lengths = called_whole(fused_attention)  # its masks follow from the number of keys


class DotProductAttention(nn.Module):
    """Attention itself, between the projections: what "selective" recomputation computes again.

    Args:
        dropout: the share of attention probabilities to drop in training.
        head_offset: this rank's first head among all heads, whose masks differ.
        window: the keys that a query of this layer sees, its own included; None: no window of its own.
        cp_group: the ranks that rows are split over, zig-zag; None: rows are whole.
        context_method: how those ranks exchange keys and values.
        scale, softcap: of the scores, as in ``fused_attention``.
    """

    def __init__(
        self,
        dropout: float,
        head_offset: int,
        window: int | None = None,
        cp_group: ProcessGroup | None = None,
        context_method: ContextMethod | None = None,
        *,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.cp_group = cp_group
        self.context_method = context_method or ContextMethod()
        self.dropout = DropoutSite(dropout)
        self.head_offset = head_offset
        self.window = window
        self.scale, self.softcap = scale, softcap

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: LayerContext, sink: Tensor | None = None) -> Tensor:
        """Attention of the last Sq of Sk positions.

        Args:
            q: [Sq, B, A, D]; Sq < Sk after a cache of keys and values; [S/cp, B, A, D] of rows split over cp.
            k, v: [Sk, B, G, D], A divisible by G; query head a reads group a // (A / G).
            context: its mask, documents, ``position_bias`` and ``token_dropout_key`` are read.
            sink: [A], a score in every softmax of the head that has no value.

        Returns:
            [Sq, B, A, D].

        Raises:
            ShapeError: dropout, a prefix, or rows split over cp where queries follow a cache.
            ConfigError: a prefix over packed documents, or in rows split over cp.
        """
        mask, documents, bias = context.mask.within(self.window), context.documents, context.position_bias
        dropout = self.dropout.of(context.token_dropout_key)
        if self.cp_group is not None:
            by_distance = None if bias is None else bias.by_distance
            return self._over_context_ranks(self.cp_group, q, k, v, (sink, by_distance), mask, documents, dropout)
        if dropout is None and bias is None and mask.prefix is None:
            return self._fused(q, k, v, sink, mask, documents)
        if q.shape[0] != k.shape[0] and (dropout is not None or mask.prefix is not None):
            raise ShapeError("dropout and a prefix are of whole rows, and these queries follow a cache; leave it out")
        if mask.prefix is not None and documents is not None:
            raise ConfigError("a prefix is of a row that is one document; leave packed documents out")
        if dropout is None and bias is None:
            return self._with_prefix(q, k, v, sink, mask)
        seen = mask.visible(k.shape[0], q.device, documents, q.shape[0])
        scores_as = Scores(self.scale, self.softcap, None if bias is None else bias.whole, sink)
        # Inductor shifts the integers of dropout's mask as floats, and its C++ does not build (torch 2.13): not traced
        spelled_out = attend if dropout is None else torch.compiler.disable(attend)
        out: Tensor = spelled_out(q, k, v, scores_as, seen, dropout=dropout, head_offset=self.head_offset)
        return out

    def _fused(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        mask: AttentionMask,
        documents: PackedSeqParams | None,
    ) -> Tensor:
        # by torch's kernel one call serves any number of keys
        is_plain = mask.window is None and documents is None and self.softcap is None and q.dtype != torch.float64
        attend = fused_attention if is_plain else _attention_by_lengths
        out, _ = attend(
            q,
            k,
            v,
            causal=mask.causal,
            scale=self.scale,
            window=mask.sides,
            packed_seq_params=documents,
            sink=sink,
            softcap=self.softcap,
        )
        return out

    def _over_context_ranks(
        self,
        group: ProcessGroup,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink_and_bias: tuple[Tensor | None, Tensor | None],
        mask: AttentionMask,
        documents: PackedSeqParams | None,
        dropout: Dropout | None,
    ) -> Tensor:
        if q.shape[0] != k.shape[0]:
            raise ShapeError("context parallelism is of whole rows, and these queries follow a cache; leave it out")
        if mask.prefix is not None:
            raise ConfigError("context parallelism has no prefix that is read both ways; set parallel.context=1")
        sink, bias = sink_and_bias
        # a compiler would cut what travels between ranks apart from what is computed meanwhile: not traced
        attend = torch.compiler.disable(context_attention)
        out: Tensor = attend(
            q,
            k,
            v,
            group,
            self.context_method,
            causal=mask.causal,
            window=mask.sides,
            packed_seq_params=documents,
            dropout=dropout,
            head_offset=self.head_offset,
            scale=self.scale,
            sink=sink,
            softcap=self.softcap,
            bias=bias,
        )
        return out

    def _with_prefix(self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, mask: AttentionMask) -> Tensor:
        """Two fused calls: a query within the prefix sees all of the prefix, one after it what is causal."""
        assert mask.prefix is not None, "the caller has looked"
        within = self._fused(q, k, v, sink, BIDIRECTIONAL, mask.prefix.documents)
        after = self._fused(q, k, v, sink, CAUSAL, None)
        covers = mask.prefix.covers.t()[..., None, None]  # [S, B, 1, 1]
        return torch.where(covers, within, after)
