"""Expert capacity: drops tokens past a limit per expert, and pads experts to a fixed number of rows.

    C = ceil(factor * T K / E), T at most

An expert keeps the C tokens with the largest weights, earlier tokens first among equals, or simply the first C. The
weights of kept tokens are not rescaled. Lepikhin et al. 2020, "GShard", arXiv:2006.16668.
"""

import math
from dataclasses import replace
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from megalith.fusions.experts.row_map import RowMap
from megalith.transformer.moe.routing import Routing, of_real_tokens

__all__ = ["capacity_of_real_tokens", "drop_past_capacity", "expert_capacity", "fixed_row_map"]


def expert_capacity(num_tokens: int, top_k: int, num_experts: int, factor: float) -> int:
    """Returns C, the most tokens that an expert takes of the T that a rank processes at a time."""
    share = _share(top_k, num_experts, factor)
    return min(math.ceil(share * num_tokens), num_tokens)


def capacity_of_real_tokens(real: Tensor, top_k: int, num_experts: int, factor: float) -> Tensor:
    """Returns ``expert_capacity`` of the tokens that ``real``, bool [T], does not mark as padding; an int64 scalar."""
    share, num_tokens = _share(top_k, num_experts, factor), real.sum()
    return torch.minimum(-(-num_tokens * share.numerator // share.denominator), num_tokens)


def drop_past_capacity(
    routing: Routing, capacity: int | Tensor, drop: Literal["probability", "position"], real: Tensor
) -> Routing:
    """Returns ``routing`` with choices past an expert's ``capacity`` marked as dropped.

    ``real`` is bool [T]; padding is dropped, so that it takes up no capacity. Choices that ``routing`` already marks as
    dropped stay dropped.
    """
    E = len(routing.tokens_per_expert)
    priority = routing.weights.detach() if drop == "probability" else None
    candidates = of_real_tokens(routing.indices, real, E).clamp_max(E)
    kept = (_rank_in_expert(candidates, E, priority) < capacity) & (candidates < E)
    indices = torch.where(kept | (routing.indices >= E), routing.indices, routing.indices + E)
    return replace(routing, indices=indices, weights=routing.weights * kept)


def fixed_row_map(indices: Tensor, num_experts: int, capacity: int) -> RowMap:
    """Maps rows sorted by expert, then by token, with exactly ``capacity`` rows per expert, so that R = E C.

    ``indices`` are int64 [T, K] with at most ``capacity`` choices of each expert; an expert's remaining rows are gaps.
    No host synchronization.
    """
    T, K = indices.shape
    kept = indices < num_experts
    row_of = torch.where(kept, indices * capacity + _rank_in_expert(indices, num_experts), -1)  # [T, K]
    # dropped choices are written to an extra row at the end
    token_of = torch.full((num_experts * capacity + 1,), -1, dtype=torch.int32, device=indices.device)
    tokens = torch.arange(T, dtype=torch.int32, device=indices.device)[:, None].expand(T, K)
    token_of[torch.where(kept, row_of, num_experts * capacity)] = tokens
    rows_per_expert = torch.full((num_experts,), capacity, dtype=torch.int32, device=indices.device)
    return RowMap(row_of.int(), token_of[:-1], rows_per_expert)


def _share(top_k: int, num_experts: int, factor: float) -> Fraction:
    # 1.1 is exactly eleven tenths, and 1.3333333333333333 four thirds: small numbers, whose products fit into int64
    return Fraction(str(factor)).limit_denominator(10**6) * top_k / num_experts


def _rank_in_expert(indices: Tensor, num_experts: int, priority: Tensor | None = None) -> Tensor:
    """Returns int64 [T, K], the rank of each choice within its expert, by descending ``priority``, then by position."""
    flat = indices.flatten().clamp_max(num_experts)  # dropped choices are ranked among themselves
    by_priority = None if priority is None else priority.flatten().argsort(descending=True, stable=True)
    order = flat.argsort(stable=True) if by_priority is None else by_priority[flat[by_priority].argsort(stable=True)]
    counts = flat.new_zeros(num_experts + 1).scatter_add_(0, flat, torch.ones_like(flat))
    starts = counts.cumsum(0) - counts
    position = torch.arange(len(flat), device=flat.device) - starts[flat[order]]
    return torch.empty_like(flat).scatter_(0, order, position).view(indices.shape)
