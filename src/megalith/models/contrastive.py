"""The contrastive loss of retrieval models: the passages of other queries are negatives, on all ranks.

    loss of query i    -log softmax_m(q_i . p_m / temperature)[i]

Here q_i and p_i are the embeddings of query i and of its positive passage, and m runs over all passages of the batch:
positives and hard negatives. Passages that are known to answer query i are left out: those with the text of its
positive, and the positives of other queries with the same text.

van den Oord et al. 2018, "InfoNCE", arXiv:1807.03748; negatives from the batch as in Karpukhin et al. 2020, "DPR",
arXiv:2004.04906.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from megalith.errors import ShapeError
from megalith.topology.collectives import gather_from_sequence_parallel_region

__all__ = ["Passages", "contrastive_losses", "gather_passages", "in_batch_contrastive_loss", "places_of_positives"]

_AT_ONCE = 1 << 24  # similarities in memory at a time, 64 MiB in float32


@dataclass(frozen=True)
class Passages:
    """The passages that queries are compared with: P of each of R rows, those of all ranks; M = R P.

    Attributes:
        embeddings: [M, D], in float32 or wider; the first passage of a row is its query's positive.
        text_ids: int64 [M], equal for passages with the same text.
        query_ids: int64 [M], the text id of the query of each passage's row.
        places: int64 [M], the place of each passage's row among all samples; -1 for one that no query is compared with.
        per_row: P.
        first_row: index of this rank's first row.
    """

    embeddings: Tensor
    text_ids: Tensor
    query_ids: Tensor
    places: Tensor
    per_row: int
    first_row: int

    def positives(self, rows: Tensor) -> Tensor:
        """Returns the index int64 [N] of the positive passage of each of this rank's ``rows``, int64 [N]."""
        return (self.first_row + rows) * self.per_row

    def outside_batches(self, positives: Tensor, batch_size: int | None) -> Tensor:
        """Returns whether a passage is not compared with the queries of ``positives`` [N], bool [N, M] or [1, M].

        Batches are ``batch_size`` consecutive samples; the queries of a smaller rest are in the last ``batch_size``
        samples. None: one batch of all.
        """
        are_left_out = (self.places < 0).unsqueeze(0)
        if batch_size is None:
            return are_left_out
        own = self.places[positives].unsqueeze(1)
        last = (self.places.max() + 1 - batch_size).clamp(min=0)  # first sample of the last batch
        firsts = torch.minimum(own - own % batch_size, last)
        return are_left_out | (self.places < firsts) | (self.places >= firsts + batch_size)

    def known_answers(self, positives: Tensor) -> Tensor:
        """Returns whether a passage answers the query of ``positives`` [N] too, bool [N, M]; False for itself."""
        is_first = torch.arange(len(self.text_ids), device=positives.device) % self.per_row == 0
        found = self.text_ids == self.text_ids[positives].unsqueeze(1)
        found |= is_first & (self.query_ids == self.query_ids[positives].unsqueeze(1))
        return found.scatter(1, positives.unsqueeze(1), value=False)


def in_batch_contrastive_loss(
    queries: Tensor,
    passages: Tensor,
    *,
    temperature: float,
    text_ids: Tensor | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Returns the loss of each of this rank's queries, [N] in float32 or wider.

    The gradients are those of the sum over all ranks. Collective over ``group``, in forward and in backward.

    Args:
        queries: [N, D], embeddings; every rank of ``group`` has as many.
        passages: [N, P, D], embeddings: the positive passage of each query, then its P - 1 hard negatives.
        temperature: divides the similarities.
        text_ids: int64 [N, 1 + P], an id for the text of each query and of its passages, equal for equal texts; by
            default all texts are different.
        group: ranks with other queries, whose passages are negatives too; None: this rank alone.

    Raises:
        ShapeError: other shapes.
    """
    if queries.dim() != 2 or passages.dim() != 3 or not passages.shape[1] or passages[:, 0].shape != queries.shape:
        raise ShapeError(
            "queries must be [N, D], and passages [N, P, D] with each query's positive first; got "
            f"{list(queries.shape)} and {list(passages.shape)}"
        )
    (N, P, _), rank = passages.shape, 0 if group is None else group.rank()
    if text_ids is None:
        text_ids = torch.arange(N * (1 + P), device=queries.device).view(N, 1 + P) + rank * N * (1 + P)
    if text_ids.shape != (N, 1 + P):
        raise ShapeError(f"text_ids must be [N, 1 + P], [{N}, {1 + P}]; got {list(text_ids.shape)}")
    rows = torch.arange(N, device=queries.device)
    found = gather_passages(passages, text_ids, torch.zeros_like(rows), group)
    return contrastive_losses(queries, rows, found, temperature)


def gather_passages(passages: Tensor, text_ids: Tensor, places: Tensor, group: ProcessGroup | None) -> Passages:
    """Gathers the passages [R/W, P, D] of the rows of all ranks of ``group``, each of which has as many.

    ``text_ids`` [R/W, 1 + P] as in ``in_batch_contrastive_loss``; ``places``: int64 [R/W], the place of each row among
    all samples, -1 for a row that does not count. Gradients are summed over the ranks.
    """
    rows, P, _ = passages.shape
    wide = passages.to(torch.promote_types(passages.dtype, torch.float32))
    embeddings = gather_from_sequence_parallel_region(wide, group).flatten(0, 1)  # [M, D]
    about = gather_from_sequence_parallel_region(torch.cat((places.unsqueeze(1), text_ids), dim=1), group)
    return Passages(
        embeddings,
        text_ids=about[:, 2:].flatten(),
        query_ids=about[:, 1].repeat_interleave(P),
        places=about[:, 0].repeat_interleave(P),
        per_row=P,
        first_row=0 if group is None else group.rank() * rows,
    )


def contrastive_losses(
    queries: Tensor, rows: Tensor, passages: Passages, temperature: float, batch_size: int | None = None
) -> Tensor:
    """Returns the losses [N] of ``queries`` [N, D] of this rank's ``rows``, int64 [N], among passages of their batch.

    ``batch_size``: as in ``Passages.outside_batches``. Similarities are computed a part at a time, and again in
    backward.
    """
    wide = queries.to(passages.embeddings.dtype) / temperature
    positives = passages.positives(rows)

    def losses(some: Tensor, embeddings: Tensor, own: Tensor) -> Tensor:
        is_left_out = passages.known_answers(own) | passages.outside_batches(own, batch_size)
        scores = (some @ embeddings.t()).masked_fill(is_left_out, float("-inf"))  # [n, M]
        return scores.logsumexp(dim=1) - scores.gather(1, own.unsqueeze(1)).squeeze(1)

    at_once = max(1, _AT_ONCE // len(passages.text_ids))
    if len(wide) <= at_once:
        return losses(wide, passages.embeddings, positives)
    parts = zip(wide.split(at_once), positives.split(at_once), strict=True)
    found = [
        cast(Tensor, checkpoint(losses, some, passages.embeddings, own, use_reentrant=False)) for some, own in parts
    ]
    return torch.cat(found)


def places_of_positives(queries: Tensor, rows: Tensor, passages: Passages) -> Tensor:
    """Returns the place of each query's positive among all passages by similarity, int64 [N]; 1 is the first.

    Arguments as in ``contrastive_losses``; the passages of all batches are compared, without other known answers. Of
    passages with the same similarity the positive is last, so that a model with equal embeddings finds nothing.
    """
    wide, positives = queries.to(passages.embeddings.dtype), passages.positives(rows)
    at_once = max(1, _AT_ONCE // len(passages.text_ids))
    found = []
    for some, own in zip(wide.split(at_once), positives.split(at_once), strict=True):
        scores = some @ passages.embeddings.t()
        is_left_out = passages.known_answers(own) | passages.outside_batches(own, None)
        is_behind = scores < scores.gather(1, own.unsqueeze(1))  # never with NaN
        found.append((~is_behind & ~is_left_out).sum(dim=1))
    return torch.cat(found)
