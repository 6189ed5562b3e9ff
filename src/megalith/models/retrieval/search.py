"""Exact maximum inner product search: the passages whose embeddings have the largest inner products with a query's.

    score of passage p for query q    sum over d of q[d] p[d]

All embeddings are read once, a block at a time, and only the best k so far are kept. Scores are summed in float64 and
rounded to float32: so equal embeddings have equal scores, although products of different sizes sum in different orders.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megalith.errors import ConfigError, ShapeError
from megalith.models.retrieval.passage_index import PassageIndex

__all__ = ["search"]

_ELEMENTS_AT_ONCE = 1 << 22  # of embeddings, 32 MiB in float64
_SCORES_AT_ONCE = 1 << 22  # 32 MiB
_LOW = (1 << 32) - 1


def search(
    index: PassageIndex, queries: Tensor, k: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> tuple[Tensor, Tensor]:
    """Returns the scores, float32 [Q, k], and ids, int64 [Q, k], of the best passages of each query, the best first.

    Of equal scores the lowest id comes first. The result for a query does not depend on the other queries. An index of
    fewer than k passages has all of them in the result.

    Args:
        queries: [Q, D], embeddings; the search runs on their device.
        progress: called with the number of passages done and the total.

    Raises:
        ConfigError: k is below 1.
        ShapeError: the queries have another size than the passages, or are not finite.
        DataError, StorageError: as ``PassageIndex.blocks``.
    """
    if k < 1:
        raise ConfigError(f"the number of passages to find must be 1 or more; got {k}; use 10")
    if queries.dim() != 2 or queries.shape[1] != index.embedding_size:
        raise ShapeError(
            f"queries must be [Q, D] with D = {index.embedding_size}, as the passages in {index.store}; got "
            f"{list(queries.shape)}; embed them with the model of the index"
        )
    if not queries.isfinite().all():
        raise ShapeError("queries must be finite; at least one has an infinite or NaN feature; check the model")
    Q, D = queries.shape
    wide, N = queries.double(), index.num_passages
    best = torch.empty(Q, 0, dtype=torch.int64, device=queries.device)
    progress(0, N)
    for first, rows in index.blocks(max(1, _ELEMENTS_AT_ONCE // D), torch.float64):
        passages = rows.to(queries.device)
        at_once = max(1, _SCORES_AT_ONCE // len(rows))
        parts = zip(wide.split(at_once), best.split(at_once), strict=True)
        best = torch.cat([_merged(some, passages, first, kept, min(k, N)) for some, kept in parts]) if Q else best
        progress(first + len(rows), N)
    return _scores_of(best >> 32), _LOW - (best & _LOW)


def _merged(queries: Tensor, passages: Tensor, first: int, best: Tensor, k: int) -> Tensor:
    """Returns the largest keys int64 [Q, k] of these passages and of ``best``, the largest first.

    A key has a score in its high 32 bits, and an id in the others, counted downwards: of equal scores, the one with the
    lowest id has the largest key. Which of equal scores torch.topk would take is not specified.
    """
    scores = (queries @ passages.t()).float() + 0.0  # [Q, n]; -0.0 becomes 0.0
    ids = torch.arange(first, first + len(passages), device=passages.device)
    keys = torch.cat((best, (_ordered(scores.view(torch.int32)) << 32) + (_LOW - ids)), dim=1)  # [Q, kept + n]
    return keys.topk(min(k, keys.shape[1]), dim=1).values


def _ordered(bits: Tensor) -> Tensor:
    """Returns int64 numbers in the order of the float32 numbers with these ``bits``, int32; its own inverse.

    The bits of negative numbers are in the opposite order.
    """
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()


def _scores_of(ordered: Tensor) -> Tensor:
    """The float32 numbers that ``_ordered`` has numbered."""
    return _ordered(ordered.int()).int().view(torch.float32)
