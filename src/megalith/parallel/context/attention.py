"""Attention over a sequence that is split zig-zag over cp, with a choice of exchange methods.

    method       what is communicated                              each rank computes
    ring         k and v, from rank to rank, cp - 1 times          its queries, over one part of the keys after another
    all_gather   k and v, to all ranks at once                     its queries, over all keys
    all_to_all   q, k, v and out, sequence shards for head shards  all queries, for A/cp heads
    two_level    all_to_all among `inner` neighbours, and a ring across these groups

A ring holds two parts of the keys at a time, all_gather all of them. all_to_all sends least, and needs the heads of a
tp rank to be divisible by cp. two_level uses all_to_all over fast links, and rings between machines. Gradients of k and
v are summed in float32 or wider by a ring, and in their own dtype by the reduce-scatter of all_gather.

Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv:2309.14509; Fang and Zhao 2024, "USP", arXiv:2405.07719.
"""

from dataclasses import dataclass, replace
from math import gcd
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megalith.errors import ConfigError, ShapeError
from megalith.fusions.core.dispatch import chosen_by_use
from megalith.numerics.dropout import Dropout
from megalith.packed_seq_params import PackedSeqParams
from megalith.parallel.context.blocks import VisibleKeys
from megalith.parallel.context.partial_attention import HeadDropout, PartialAttention
from megalith.parallel.context.ring import Ring, ring_attention
from megalith.parallel.context.zigzag import zigzag_join, zigzag_spans, zigzag_split
from megalith.topology.collectives import all_to_all, gather_from_sequence_parallel_region

__all__ = ["ContextMethod", "context_attention"]


@dataclass(frozen=True)
class ContextMethod:
    """How ranks of cp exchange keys and values; ``inner``: how many neighbours exchange heads in ``two_level``."""

    name: Literal["ring", "all_gather", "all_to_all", "two_level"] = "ring"
    inner: int = 1

    def ranks_trading_heads(self, size: int) -> int:
        """Returns how many of ``size`` ranks exchange heads with one another (all-to-all); 1 if none do.

        Raises:
            ConfigError: ``inner`` does not divide ``size``.
        """
        if self.name == "two_level" and size % self.inner:
            raise ConfigError(
                f"inner ({self.inner}) must divide the {size} ranks of cp; use another value, or the ring"
            )
        return {"all_to_all": size, "two_level": self.inner}.get(self.name, 1)


def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: ProcessGroup,
    method: ContextMethod,
    *,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    packed_seq_params: PackedSeqParams | None = None,
    dropout: Dropout | None = None,
    head_offset: int = 0,
    scale: float | None = None,
    sink: Tensor | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Returns the output of ``fused_attention``, [S/cp, B, A, D], for rows that are split zig-zag over ``group``.

    Args:
        q: [S/cp, B, A, D].
        k, v: [S/cp, B, G, D], A divisible by G.
        group: cp.
        method: the exchange.
        causal, window: as in ``fused_attention``, over positions in the whole row.
        packed_seq_params: of the whole rows, the same on all ranks.
        dropout: of attention probabilities; the tokens of its key are the global ids of this rank's tokens, [B, S/cp].
        head_offset: global index, over all ranks of tp, of this rank's first head.
        scale, sink, softcap: as in ``fused_attention``; the gradient of the sink [A] must be summed over cp.
        bias: [A, 2S - 1], added to the scores by distance (``relative_bias``); its gradient must be summed over cp too.

    Raises:
        ShapeError: S is not divisible into whole chunks, ``packed_seq_params`` are of another row length, or the heads
            are not divisible by the ranks that exchange them.
        ConfigError: ``method.inner`` does not divide cp; a window, scale or softcap that ``fused_attention`` rejects.
    """
    W, S = group.size(), q.shape[0] * group.size()
    if packed_seq_params is not None and packed_seq_params.seq_length != S:
        raise ShapeError(
            f"packed_seq_params must describe whole rows of {S} tokens, {q.shape[0]} on each of the {W} ranks of cp; "
            f"got rows of {packed_seq_params.seq_length}"
        )
    visible = VisibleKeys.of(causal, window, packed_seq_params)
    drops = None if dropout is None else HeadDropout(dropout, head_offset)
    if method.name == "all_gather":
        attention = PartialAttention(
            zigzag_spans(S, W, group.rank()), visible, drops, chosen_by_use(), scale=scale, softcap=softcap
        )
        k, v = (zigzag_join(gather_from_sequence_parallel_region(x, group), W) for x in (k, v))  # [S, B, G, D]
        return ring_attention(q, k, v, sink, attention, Ring(None), [[range(S)]], bias)
    inner = method.ranks_trading_heads(W)
    ring = Ring(group if inner < W else None, inner)
    spans = [zigzag_spans(S, ring.size, index) for index in range(ring.size)]
    trade = _HeadTrade(group, inner)
    q, k, v = (trade.for_sequence(x) for x in trade.divisible(q, k, v))  # [S/cp inner, B, A/inner, D]
    drops = None if drops is None else trade.dropout(drops, q.shape[2])
    sink, bias = (None if x is None else trade.of_heads(x) for x in (sink, bias))
    attention = PartialAttention(spans[ring.index], visible, drops, chosen_by_use(), scale=scale, softcap=softcap)
    return trade.for_heads(ring_attention(q, k, v, sink, attention, ring, spans, bias))


@dataclass(frozen=True)
class _HeadTrade:
    """All-to-all among ``inner`` neighbours of ``group`` that exchanges sequence shards for head shards.

    The collective runs over the whole group; ranks that are not neighbours exchange nothing.
    """

    group: ProcessGroup
    inner: int

    def divisible(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Repeats k and v until ``inner`` divides their number of groups, which leaves the attention unchanged."""
        A, G = q.shape[2], k.shape[2]
        if A % self.inner:
            raise ShapeError(
                f"the {A} heads of a rank must be divisible by the {self.inner} ranks of cp that exchange them in the "
                "all-to-all; use another number of ranks, or the ring"
            )
        copies = self.inner // gcd(G, self.inner)
        return q, k.repeat_interleave(copies, dim=2), v.repeat_interleave(copies, dim=2)

    def for_sequence(self, x: Tensor) -> Tensor:
        """[S/cp, B, A, D] -> [S/cp inner, B, A/inner, D], with the neighbours' parts joined in order of position."""
        if self.inner == 1:
            return x
        parts = torch.cat(x.chunk(self.inner, dim=2))  # [inner S/cp, B, A/inner, D], one part per neighbour
        return zigzag_join(self._exchanged(parts), self.inner)

    def for_heads(self, x: Tensor) -> Tensor:
        """The inverse of ``for_sequence``."""
        if self.inner == 1:
            return x
        parts = self._exchanged(zigzag_split(x, self.inner))
        return torch.cat(parts.chunk(self.inner), dim=2)

    def dropout(self, drops: HeadDropout, num_heads: int) -> HeadDropout:
        """Returns ``drops`` for the queries and the ``num_heads`` heads that this rank has after the exchange."""
        key = drops.dropout.key
        if self.inner == 1 or key is None:
            return drops
        tokens = key.tokens.t().repeat(self.inner, 1)  # [inner S/cp, B]: every neighbour needs all ids
        tokens = zigzag_join(self._exchanged(tokens), self.inner).t()  # [B, S/cp inner]
        offset = drops.head_offset + self.group.rank() % self.inner * num_heads
        return HeadDropout(Dropout(drops.dropout.p, replace(key, tokens=tokens)), offset)

    def of_heads(self, x: Tensor) -> Tensor:
        """Returns the part of ``x`` [A, ...] for the heads that this rank has after the exchange."""
        return x.chunk(self.inner)[self.group.rank() % self.inner]

    def _exchanged(self, parts: Tensor) -> Tensor:
        """Sends part i of ``parts`` to neighbour i, and returns the parts received from the neighbours."""
        first = self.group.rank() // self.inner * self.inner
        size = parts.shape[0] // self.inner
        counts = [size if first <= rank < first + self.inner else 0 for rank in range(self.group.size())]
        return all_to_all(parts, self.group, counts, counts)
