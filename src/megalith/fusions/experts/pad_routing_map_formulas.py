"""Implements the formulas stated in ``pad_routing_map``; T tokens, E experts."""

import torch
from torch import Tensor

from megalith.fusions.core.blocks import blocks
from megalith.fusions.core.registration import register_without_gradient

__all__ = ["blocked", "outputs", "reference"]


def reference(routing_map: Tensor, pad_multiple: int) -> Tensor:
    """The padded map. Transposed so that counting runs along contiguous memory."""
    zero = routing_map.t().contiguous() == 0  # [E, T]
    num_zeros = zero.cumsum(dim=1, dtype=torch.int32)
    missing = (zero.sum(dim=1) - zero.shape[1]) % pad_multiple
    added = zero & (num_zeros <= missing[:, None])
    return routing_map.clone().masked_fill_(added.t(), 1)  # masked_fill would use the stride order of the mask


def outputs(routing_map: Tensor, pad_multiple: int) -> Tensor:
    """Allocates the padded map."""
    return torch.empty_like(routing_map)


def _forward(routing_map: Tensor, pad_multiple: int) -> Tensor:
    """Like ``reference``, but after the block in which all columns are complete, rows are only copied."""
    T, E = routing_map.shape
    padded = outputs(routing_map, pad_multiple).copy_(routing_map)
    missing = -routing_map.count_nonzero(dim=0) % pad_multiple
    for block in blocks(T, E):
        if not missing.any():
            break
        rows = padded[block]
        zero = rows.t().contiguous() == 0
        num_zeros = zero.cumsum(dim=1, dtype=torch.int32)
        rows.masked_fill_((zero & (num_zeros <= missing[:, None])).t(), 1)
        missing = (missing - zero.sum(dim=1)).clamp_min(0)
    return padded


blocked = register_without_gradient("pad_routing_map_blocked", _forward, outputs, opaque=True)
