"""What the routers of a step did, over all ranks: how often each expert was chosen, and the balance losses.

It travels with the sums of the loss terms, in the one all-reduce after the step: for each layer with experts its load
[E], then the mean of each balance loss.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megalith.training.tasks.task import AnyTask
from megalith.transformer.step_record import BALANCE_LOSSES, StepRecord

__all__ = ["RoutingTotals", "routing_sums", "routing_totals"]


@dataclass(frozen=True)
class RoutingTotals:
    """Of a step, by layer.

    Attributes:
        loads: int64 [E], how often tokens of the global batch chose each expert, before any were dropped.
        losses: of each balance loss by name, without its weight, the mean of all micro-batches.
    """

    loads: Mapping[int, Tensor] = field(default_factory=dict)
    losses: Mapping[int, Mapping[str, float]] = field(default_factory=dict)


def routing_sums(task: AnyTask, record: StepRecord, device: torch.device) -> Tensor:
    """What this rank adds, float64 [n]; zeros for layers of other stages."""
    parts = [torch.zeros(0, dtype=torch.float64, device=device)]
    for layer, num_experts in task.routed_layers.items():
        load = record.tokens_per_expert(layer)
        parts.append(parts[0].new_zeros(num_experts) if load is None else load.to(torch.float64))
        parts.append(parts[0].new_tensor([record.loss(name, layer) for name in BALANCE_LOSSES]))
    return torch.cat(parts)


def routing_totals(task: AnyTask, sums: Sequence[float], num_micro_batches: int) -> RoutingTotals:
    """The totals, from what ``routing_sums`` gave on all ranks, added up, for so many micro-batches of all ranks."""
    loads, losses = {}, {}
    position = 0
    for layer, num_experts in task.routed_layers.items():
        load = sums[position : position + num_experts]
        position += num_experts
        loads[layer] = torch.tensor(load, dtype=torch.int64)
        means = (value / num_micro_batches for value in sums[position : position + len(BALANCE_LOSSES)])
        losses[layer] = dict(zip(BALANCE_LOSSES, means, strict=True))
        position += len(BALANCE_LOSSES)
    return RoutingTotals(loads, losses)
