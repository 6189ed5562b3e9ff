"""What the routers of a step did, over all ranks: how often each expert was chosen, and the balance losses.

It travels with the sums of the loss terms, in the one all-reduce after the step: for each layer with experts its load
[E], the mean of each balance loss that it has, and the estimates of offsets [E+1] where it chooses by quantiles.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megalith.config import MoEConfig
from megalith.transformer.module import ModelModule
from megalith.transformer.step_record import BALANCE_LOSSES, StepRecord

__all__ = ["RoutingTotals", "routing_sums", "routing_totals", "update_routers_"]

_LOAD, _OFFSETS = "load", "quantile_offsets"


@dataclass(frozen=True)
class RoutingTotals:
    """Of a step, by layer.

    Attributes:
        loads: int64 [E], how often tokens of the global batch chose each expert, before any were dropped.
        losses: of each balance loss by name, without its weight, the mean of all micro-batches.
        offsets: float64 [E+1], the sum of what micro-batches estimate, and how many did.
    """

    loads: Mapping[int, Tensor] = field(default_factory=dict)
    losses: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    offsets: Mapping[int, Tensor] = field(default_factory=dict)


def routing_sums(layers: Mapping[int, MoEConfig], record: StepRecord, device: torch.device) -> Tensor:
    """What this rank adds for ``layers``, float64 [n]; zeros for those of other stages."""
    parts = [torch.zeros(0, dtype=torch.float64, device=device)]
    for layer, moe in layers.items():
        for name, width in _parts(moe):
            if name in BALANCE_LOSSES:
                parts.append(parts[0].new_tensor([record.loss(name, layer)]))
                continue
            found = record.tokens_per_expert(layer) if name == _LOAD else record.total(name, layer)
            parts.append(parts[0].new_zeros(width) if found is None else found.to(torch.float64))
    return torch.cat(parts)


def routing_totals(layers: Mapping[int, MoEConfig], sums: Sequence[float], num_micro_batches: int) -> RoutingTotals:
    """The totals, from what ``routing_sums`` gave on all ranks, added up, for so many micro-batches of all ranks."""
    left = iter(sums)
    found: dict[int, dict[str, list[float]]] = {
        layer: {name: [next(left) for _ in range(width)] for name, width in _parts(moe)}
        for layer, moe in layers.items()
    }
    return RoutingTotals(
        loads={layer: torch.tensor(parts[_LOAD], dtype=torch.int64) for layer, parts in found.items()},
        losses={
            layer: {name: parts[name][0] / num_micro_batches for name in BALANCE_LOSSES if name in parts}
            for layer, parts in found.items()
        },
        offsets={
            layer: torch.tensor(parts[_OFFSETS], dtype=torch.float64)
            for layer, parts in found.items()
            if _OFFSETS in parts
        },
    )


def update_routers_(chunks: Sequence[ModelModule], totals: RoutingTotals) -> None:
    """Moves what choices are made by, after a step that was applied."""
    for chunk in chunks:
        for layer, router in chunk.routers().items():
            offsets = totals.offsets.get(layer)
            device = router.weight.device
            router.update_balance_(totals.loads[layer].to(device), None if offsets is None else offsets.to(device))


def _parts(moe: MoEConfig) -> Iterator[tuple[str, int]]:
    """What is summed for a layer, and how many numbers each is."""
    E, router = moe.num_experts, moe.router
    yield _LOAD, E
    yield from ((name, 1) for name in BALANCE_LOSSES if getattr(router, name))
    if router.selection == "quantile":
        yield _OFFSETS, E + 1
