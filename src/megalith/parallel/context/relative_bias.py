"""A bias on attention scores that depends only on the distance between key and query, for ranges of both.

bias(i, j) = by_distance[j - i + P - 1]        by_distance [A, 2P - 1], for distances below P
"""

import torch
from torch import Tensor

__all__ = ["add_gradient_between_", "bias_between"]


def bias_between(by_distance: Tensor, queries: range, keys: range) -> Tensor:
    """Returns the bias [A, len(queries), len(keys)] for these positions; differentiable."""
    band = by_distance[:, _band(by_distance, queries, keys)]
    # window w of the band belongs to the query w positions before the last
    return band.unfold(1, len(keys), 1).flip(1)


def add_gradient_between_(gradient: Tensor, dbias: Tensor, queries: range, keys: range) -> None:
    """Adds the gradient ``dbias`` of ``bias_between``'s output to ``gradient``, that of ``by_distance``."""
    before_last = torch.arange(len(queries) - 1, -1, -1, device=dbias.device).unsqueeze(1)
    in_band = torch.arange(len(keys), device=dbias.device) + before_last  # [Sq, Sk]
    gradient[:, _band(gradient, queries, keys)].index_add_(1, in_band.flatten(), dbias.flatten(1))


def _band(by_distance: Tensor, queries: range, keys: range) -> slice:
    """The indices of all distances between ``keys`` and ``queries``, from the smallest (first key, last query)."""
    P = (by_distance.shape[1] + 1) // 2
    first = keys.start - (queries.stop - 1) + P - 1
    return slice(first, first + len(queries) + len(keys) - 1)
