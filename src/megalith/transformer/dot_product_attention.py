"""Scaled dot-product attention over grouped heads, with any mask, packed documents and reproducible dropout.

    o = softmax(s + mask) v,   s = q k^T / sqrt(D), or scale q k^T, or c tanh(scale q k^T / c) with a softcap c

Without dropout this is ``fused_attention``, which never materializes the S x S scores, except on its reference path for
float64. Dropout, and a relative position bias, which has a gradient, materialize them: ``unfused_attention``.
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
from megalith.transformer.unfused_attention import Scores, attend

__all__ = ["DotProductAttention"]

_attention_by_lengths = called_whole(fused_attention)  # its masks depend on the number of keys


class DotProductAttention(nn.Module):
    """Attention between the projections: the module "core_attn" of selective recomputation.

    Args:
        dropout: the fraction of attention probabilities to drop in training.
        head_offset: global index of this rank's first head; heads have different dropout masks.
        window: how many keys a query of this layer sees, including its own; None: the layer does not limit them.
        cp_group: the ranks over which rows are split zig-zag; None: rows are whole.
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
        """Computes attention for the last Sq of Sk positions.

        Args:
            q: [Sq, B, A, D]; Sq < Sk with a key-value cache; [S/cp, B, A, D] if rows are split over cp.
            k, v: [Sk, B, G, D], A divisible by G; query head a uses group a // (A / G).
            context: its mask, documents, ``position_bias`` and ``token_dropout_key`` are used.
            sink: [A], an additional score without a value in every softmax of the head.

        Returns:
            [Sq, B, A, D].

        Raises:
            ShapeError: dropout, a prefix or rows split over cp, combined with a cache.
            ConfigError: a prefix with packed documents, or with rows split over cp.
        """
        mask, documents, bias = context.mask.within(self.window), context.documents, context.position_bias
        dropout = self.dropout.of(context.token_dropout_key)
        if self.cp_group is not None:
            by_distance = None if bias is None else bias.by_distance
            return self._over_context_ranks(self.cp_group, q, k, v, (sink, by_distance), mask, documents, dropout)
        if dropout is None and bias is None and mask.prefix is None:
            return self._fused(q, k, v, sink, mask, documents)
        if q.shape[0] != k.shape[0] and (dropout is not None or mask.prefix is not None):
            raise ShapeError("dropout and a prefix need whole rows and do not support a cache; leave the cache out")
        if mask.prefix is not None and documents is not None:
            raise ConfigError("a prefix needs rows of a single document each; leave packed documents out")
        if dropout is None and bias is None:
            return self._with_prefix(q, k, v, sink, mask)
        seen = mask.visible(k.shape[0], q.device, documents, q.shape[0])
        scores_as = Scores(self.scale, self.softcap, None if bias is None else bias.whole, sink)
        # not traced: Inductor shifts the integers of dropout's mask as floats, which does not compile (torch 2.13)
        unfused = attend if dropout is None else torch.compiler.disable(attend)
        out: Tensor = unfused(q, k, v, scores_as, seen, dropout=dropout, head_offset=self.head_offset)
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
        # a recorded call of torch's kernel can be replayed with any number of keys
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
            raise ShapeError("context parallelism needs whole rows and does not support a cache; leave the cache out")
        if mask.prefix is not None:
            raise ConfigError("context parallelism does not support a bidirectional prefix; set parallel.context=1")
        sink, bias = sink_and_bias
        # not traced: the compiler would break the overlap of communication and computation
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
        """Combines two fused calls: queries within the prefix see all of it, those after it are causal."""
        assert mask.prefix is not None, "checked by the caller"
        within = self._fused(q, k, v, sink, BIDIRECTIONAL, mask.prefix.documents)
        after = self._fused(q, k, v, sink, CAUSAL, None)
        covers = mask.prefix.covers.t()[..., None, None]  # [S, B, 1, 1]
        return torch.where(covers, within, after)
