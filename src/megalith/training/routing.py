"""Router statistics of a step over all ranks: how often each expert was chosen, and the balance losses.

They travel with the sums of the loss terms, in the one all-reduce after the step. Each layer with experts contributes
its load [E], the mean of each of its balance losses, the offset estimates [E+1] if it selects by quantiles, and the
range of its expert bias. Thus every rank also knows the statistics of layers that it does not hold.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megalith.config import MoEConfig
from megalith.transformer.module import ModelModule
from megalith.transformer.step_record import BALANCE_LOSSES, StepRecord

__all__ = ["RoutingTotals", "num_routing_sums", "routing_sums", "routing_totals", "update_routers_"]

_LOAD, _OFFSETS, _BIAS = "load", "quantile_offsets", "expert_bias"


@dataclass(frozen=True)
class RoutingTotals:
    """Router statistics of a step, by layer.

    Attributes:
        loads: int64 [E], how often tokens of the global batch chose each expert, before any were dropped.
        losses: the mean over all micro-batches of each balance loss, by name, without its weight.
        offsets: float64 [E+1], the sum of the micro-batches' estimates [E], and the number of estimates.
        bias_ranges: maximum minus minimum of the expert bias that this step used.
    """

    loads: Mapping[int, Tensor] = field(default_factory=dict)
    losses: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    offsets: Mapping[int, Tensor] = field(default_factory=dict)
    bias_ranges: Mapping[int, float] = field(default_factory=dict)


def routing_sums(
    layers: Mapping[int, MoEConfig], chunks: Sequence[ModelModule], record: StepRecord, device: torch.device
) -> Tensor:
    """Returns this rank's contribution for ``layers``, float64 [n]; zeros for layers of other stages."""
    biases = {layer: router.e_score_correction_bias for chunk in chunks for layer, router in chunk.routers().items()}
    parts = [torch.zeros(0, dtype=torch.float64, device=device)]
    for layer, moe in layers.items():
        for name, width in _parts(moe):
            if name == _BIAS:
                parts.append(_range_and_one(biases.get(layer), parts[0]))
                continue
            if name in BALANCE_LOSSES:
                found = record.loss(name, layer)
            else:
                found = record.tokens_per_expert(layer) if name == _LOAD else record.total(name, layer)
            parts.append(parts[0].new_zeros(width) if found is None else found.to(torch.float64).view(width))
    return torch.cat(parts)


def num_routing_sums(layers: Mapping[int, MoEConfig]) -> int:
    """Returns the length of the result of ``routing_sums``."""
    return sum(width for moe in layers.values() for _, width in _parts(moe))


def routing_totals(layers: Mapping[int, MoEConfig], sums: Sequence[float], num_micro_batches: int) -> RoutingTotals:
    """Computes the totals from ``routing_sums`` summed over all ranks; ``num_micro_batches`` is that of all ranks."""
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
        bias_ranges={
            layer: total / num_ranks
            for layer, parts in found.items()
            if _BIAS in parts
            for total, num_ranks in [parts[_BIAS]]
        },
    )


def update_routers_(chunks: Sequence[ModelModule], totals: RoutingTotals) -> None:
    """Updates the expert biases and quantile offsets of the routers, after a step that was applied."""
    for chunk in chunks:
        for layer, router in chunk.routers().items():
            offsets = totals.offsets.get(layer)
            device = router.weight.device
            router.update_balance_(totals.loads[layer].to(device), None if offsets is None else offsets.to(device))


def _parts(moe: MoEConfig) -> Iterator[tuple[str, int]]:
    """Yields the name and width of each quantity that is summed for a layer."""
    E, router = moe.num_experts, moe.router
    yield _LOAD, E
    yield from ((name, 1) for name in BALANCE_LOSSES if getattr(router, name))
    if router.selection == "quantile":
        yield _OFFSETS, E + 1
    if router.expert_bias_update_rate is not None:
        yield _BIAS, 2


def _range_and_one(bias: Tensor | None, like: Tensor) -> Tensor:
    """Returns [2]: the range of ``bias`` and 1, so that sums also count the ranks; zeros if ``bias`` is None."""
    if bias is None:
        return like.new_zeros(2)
    return torch.stack([bias.max() - bias.min(), bias.new_ones(())]).to(like)
