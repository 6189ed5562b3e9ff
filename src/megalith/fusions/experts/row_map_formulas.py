"""Implements the formulas stated in ``row_map``; T tokens, E experts, R rows."""

import torch
from torch import Tensor

from megalith.fusions.core.registration import register_without_gradient

__all__ = ["blocked", "counts_of", "outputs", "padded_to", "reference"]


def reference(routing_map: Tensor, num_rows: int, num_experts: int, pad_multiple: int) -> tuple[Tensor, Tensor, Tensor]:
    """row_of, token_of and rows_per_expert."""
    counts = counts_of(routing_map, num_experts)
    padded = padded_to(counts, pad_multiple)
    ends = padded.cumsum(0)
    starts = ends - padded
    token = torch.arange(routing_map.shape[0], device=routing_map.device)
    if routing_map.dtype == torch.bool:
        routed = routing_map.t().contiguous()  # [E, T]: counts along contiguous memory
        row = routed.cumsum(dim=1, dtype=torch.int32) + (starts - 1)[:, None]
        token = token.expand(row.shape)
    else:
        routed = _local(routing_map, num_experts)
        expert, order = routing_map.where(routed, num_experts).flatten().to(torch.int32).sort(stable=True)
        # sorted slots are dense; rows are offset by the gaps of the preceding experts
        gaps = torch.nn.functional.pad(starts - (counts.cumsum(0) - counts), (0, 1))
        rows = torch.arange(len(order), device=order.device) + gaps[expert]
        row = torch.empty_like(order).scatter_(0, order, rows).view(routed.shape)
        token = token[:, None].expand(row.shape)
    routed = routed & (row < num_rows)
    token_of = row.new_full((num_rows + 1,), -1).scatter_(0, row.where(routed, num_rows).flatten(), token.flatten())
    row_of = row.where(routed, -1).int()
    row_of = row_of.t().contiguous() if routing_map.dtype == torch.bool else row_of
    rows_per_expert = ends.clamp(max=num_rows) - starts.clamp(max=num_rows)
    return row_of, token_of[:num_rows].int(), rows_per_expert.int()


def counts_of(routing_map: Tensor, num_experts: int) -> Tensor:
    """Slots routed to each expert, int64 [E]."""
    if routing_map.dtype == torch.bool:
        return routing_map.sum(dim=0)
    expert = routing_map.where(_local(routing_map, num_experts), num_experts).flatten().to(torch.int64)
    return expert.new_zeros(num_experts + 1).scatter_add_(0, expert, torch.ones_like(expert))[:num_experts]


def _local(indices: Tensor, num_experts: int) -> Tensor:
    return (indices >= 0) & (indices < num_experts)


def padded_to(counts: Tensor, pad_multiple: int) -> Tensor:
    """``counts``, each rounded up to a multiple of ``pad_multiple``."""
    return counts + -counts % pad_multiple


def outputs(routing_map: Tensor, num_rows: int, num_experts: int, pad_multiple: int) -> tuple[Tensor, Tensor, Tensor]:
    """Allocates row_of, token_of and rows_per_expert."""
    row_of = torch.empty(routing_map.shape, dtype=torch.int32, device=routing_map.device)
    return row_of, row_of.new_empty(num_rows), row_of.new_empty(num_experts)


# the work is one pass over small integers; blocked only differs in being an opaque operator
blocked = register_without_gradient("row_map_blocked", reference, outputs, opaque=True)
