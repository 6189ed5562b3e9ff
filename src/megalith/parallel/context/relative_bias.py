"""A bias of scores that depends on the distance between a key and its query alone, for ranges of both.

bias(i, j) = by_distance[j - i + P - 1]        by_distance [A, 2P - 1], for distances below P
"""

import torch
from torch import Tensor

__all__ = ["add_gradient_between_", "bias_between"]


def bias_between(by_distance: Tensor, queries: range, keys: range) -> Tensor:
    """[A, len(queries), len(keys)] of queries and keys at these positions; it has a gradient."""
    band = by_distance[:, _band(by_distance, queries, keys)]
    # window w of the band belongs to the query w places before the last
    return band.unfold(1, len(keys), 1).flip(1)


def add_gradient_between_(gradient: Tensor, dbias: Tensor, queries: range, keys: range) -> None:
    """Adds to ``gradient``, that of ``by_distance``, what comes back from ``bias_between``."""
    before_last = torch.arange(len(queries) - 1, -1, -1, device=dbias.device).unsqueeze(1)
    in_band = torch.arange(len(keys), device=dbias.device) + before_last  # [Sq, Sk]
    gradient[:, _band(gradient, queries, keys)].index_add_(1, in_band.flatten(), dbias.flatten(1))


def _band(by_distance: Tensor, queries: range, keys: range) -> slice:
    """The distances from the first key's to the last query, to the last key's from the first query."""
    P = (by_distance.shape[1] + 1) // 2
    first = keys.start - (queries.stop - 1) + P - 1
    return slice(first, first + len(queries) + len(keys) - 1)
