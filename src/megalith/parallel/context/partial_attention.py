"""Forward and backward of attention between this rank's queries and keys that arrive in parts.

    forward    out, lse = merge(out, lse, attention over one part)
    backward   p = exp(s - lse) with the merged lse, so that each part yields its terms of dq, and its dk and dv

Liu et al. 2023, arXiv:2310.01889. The backward is that of Dao 2023, "FlashAttention-2", arXiv:2307.08691.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalith.fusions import merge_attention
from megalith.fusions.attention.attention import attention_gradients, fused_attention
from megalith.fusions.attention.formulas import OnScores, Seen, gradients_with_bias, reference
from megalith.fusions.core.dispatch import Backend, use
from megalith.numerics.dropout import Dropout, attention_keep_mask
from megalith.parallel.context.blocks import Block, VisibleKeys, blocks_between
from megalith.parallel.context.relative_bias import add_gradient_between_, bias_between

__all__ = ["HeadDropout", "Part", "PartialAttention"]


@dataclass(frozen=True)
class HeadDropout:
    """Attention dropout for this rank's heads; ``dropout.key.tokens`` [B, Sq] are the ids of its queries."""

    dropout: Dropout
    head_offset: int


class Part(NamedTuple):
    """A block, and the slices of its queries and keys in the tensors at hand."""

    block: Block
    queries: slice
    keys: slice


@dataclass(frozen=True)
class PartialAttention:
    """Attention of the queries at the positions ``spans``.

    ``scale`` and ``softcap`` are those of ``fused_attention``. ``by_distance`` [A, 2S - 1] is added to the scores as
    described in ``relative_bias``, and its gradient to ``dby_distance``. With ``by_distance`` or ``dropout``, the
    scores of a block are materialized: kernels compute no bias gradient and draw their own dropout masks, while ours
    depend on the ids of query and key. The backward prefers the backend ``preferred``, which ``use`` sets for the
    forward.
    """

    spans: Sequence[range]
    visible: VisibleKeys
    dropout: HeadDropout | None = None
    preferred: Backend | None = None
    scale: float | None = None
    softcap: float | None = None
    by_distance: Tensor | None = None
    dby_distance: Tensor | None = None

    def parts(self, key_spans: Sequence[range]) -> Iterator[Part]:
        """Yields all blocks of the queries with keys at ``key_spans``."""
        for queries, to_query in _placed(self.spans):
            for keys, to_key in _placed(key_spans):
                for block in blocks_between(queries, keys, self.visible):
                    at, of = to_query + block.queries.start, to_key + block.keys.start
                    yield Part(block, slice(at, at + len(block.queries)), slice(of, of + len(block.keys)))

    def add_(self, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, key_spans: Sequence[range]) -> None:
        """Merges attention over ``k`` and ``v`` in place into ``out`` [Sq, B, A, Dv], float32 or wider, and ``lse``."""
        for part in self.parts(key_spans):
            rows, queries, keys = part.block.rows, part.queries, part.keys
            found = self._forward(part.block, q[queries, rows], k[keys, rows], v[keys, rows], queries)
            merged = merge_attention(out[queries, rows], lse[rows, :, queries], *found)
            out[queries, rows], lse[rows, :, queries] = merged

    def add_gradients_(
        self,
        gradients: tuple[Tensor, Tensor, Tensor],
        dout: Tensor,
        q: Tensor,
        kv: tuple[Tensor, Tensor],
        merged: tuple[Tensor, Tensor],
        key_spans: Sequence[range],
    ) -> None:
        """Adds the gradients of attention over the keys and values ``kv`` to ``gradients`` (dq, dk, dv)."""
        (dq, dk, dv), (k, v), (out, lse) = gradients, kv, merged
        for part in self.parts(key_spans):
            rows, queries, keys = part.block.rows, part.queries, part.keys
            here = dout[queries, rows], q[queries, rows], k[keys, rows], v[keys, rows]
            found = self._backward(part.block, *here, out[queries, rows], lse[rows, :, queries], queries)
            for whole, at, term in ((dq, queries, found[0]), (dk, keys, found[1]), (dv, keys, found[2])):
                whole[at, rows] += term

    def _forward(self, block: Block, q: Tensor, k: Tensor, v: Tensor, at: slice) -> tuple[Tensor, Tensor]:
        if self._materializes_scores:
            return reference(q, k, v, None, *self._seen(block, q), on_scores=self._on_scores(block, q, at))
        return fused_attention(q, k, v, **self._fused(block))

    def _backward(
        self, block: Block, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, at: slice
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self._materializes_scores:
            seen, on_scores = self._seen(block, q), self._on_scores(block, q, at)
            dq, dk, dv, dbias = gradients_with_bias(dout, q, k, v, out, lse, *seen, on_scores=on_scores)
            if dbias is not None and self.dby_distance is not None:
                add_gradient_between_(self.dby_distance, dbias, block.queries, block.keys)
            return dq, dk, dv
        with use(self.preferred):
            return attention_gradients(dout, q, k, v, out, lse, **self._fused(block))

    @property
    def _materializes_scores(self) -> bool:
        return self.dropout is not None or self.by_distance is not None

    def _fused(self, block: Block) -> dict[str, Any]:
        return {
            "causal": False,  # included in the window
            "scale": self.scale,
            "window": block.window,
            "packed_seq_params": block.documents,
            "softcap": self.softcap,
        }

    def _seen(self, block: Block, q: Tensor) -> Seen:
        bounds = None if block.documents is None else block.documents.document_bounds
        left, right = (2**30 if side == -1 else side for side in block.window)
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        return Seen(bounds, scale, self.softcap, left, right)

    def _on_scores(self, block: Block, q: Tensor, at: slice) -> OnScores:
        """Returns the dropout factors and the bias of a block, which depend on positions in the whole row."""
        factors = None if self.dropout is None else self._factors(block, q, at, self.dropout)
        bias = None
        if self.by_distance is not None:
            bias = bias_between(self.by_distance, block.queries, block.keys)  # [A, Sq, Sk]
        return OnScores(factors, bias)

    def _factors(self, block: Block, q: Tensor, at: slice, drops: HeadDropout) -> Tensor:
        """Returns [B, A, Sq, Sk]: 0 for probabilities that are dropped, and 1 / (1 - p) for the others."""
        p, key = drops.dropout.p, drops.dropout.key
        assert key is not None, "a dropout site has a key"
        ids = replace(key, tokens=key.tokens[block.rows, at])
        kept = attention_keep_mask(ids, p, q.shape[2], len(block.keys), drops.head_offset, block.keys.start)
        return kept.to(torch.promote_types(q.dtype, torch.float32)) / (1.0 - p)


def _placed(spans: Sequence[range]) -> Iterator[tuple[range, int]]:
    """Yields each span, and the offset from its positions to indices in the concatenation of all ``spans``."""
    first = 0
    for span in spans:
        yield span, first - span.start
        first += len(span)
