"""Assigns layers to pipeline stages."""

from collections.abc import Sequence
from dataclasses import dataclass

from megalith.errors import ConfigError

__all__ = ["ModelCosts", "balanced_stages", "listed_stages"]


@dataclass(frozen=True)
class ModelCosts:
    """The cost of each part of a model in a step, counted or measured, all in the same unit."""

    layers: tuple[int, ...]
    embedding: int
    head: int


def balanced_stages(costs: ModelCosts, num_stages: int) -> list[range]:
    """Returns the layers of each stage, at least one per stage, so that the cost of the costliest stage is minimal.

    If there are several such assignments, later stages get more layers, because they hold the activations of fewer
    micro-batches.

    Raises:
        ConfigError: fewer layers than stages.
    """
    if len(costs.layers) < num_stages:
        raise ConfigError(
            f"{num_stages} stages need at least one layer each, but the model has {len(costs.layers)}; use fewer "
            "stages (parallel.pipeline, parallel.virtual)"
        )
    lowest, highest = 0, sum(costs.layers) + costs.embedding + costs.head
    while lowest < highest:  # bisect for the smallest feasible bound on a stage's cost
        middle = (lowest + highest) // 2
        if _within(costs, num_stages, middle) is None:
            lowest = middle + 1
        else:
            highest = middle
    stages = _within(costs, num_stages, lowest)
    assert stages is not None, "the whole cost is always a feasible bound"
    return stages


def listed_stages(num_layers: Sequence[int]) -> list[range]:
    """Returns the layers of each stage, given the number of layers per stage."""
    firsts = [sum(num_layers[:stage]) for stage in range(len(num_layers))]
    return [range(first, first + number) for first, number in zip(firsts, num_layers, strict=True)]


def _within(costs: ModelCosts, num_stages: int, bound: int) -> list[range] | None:
    """Returns stages that cost at most ``bound`` each, filled from the last; None if that is impossible."""
    stages: list[range] = []
    end = len(costs.layers)
    for stage in reversed(range(num_stages)):
        cost = (costs.head if stage == num_stages - 1 else 0) + (costs.embedding if stage == 0 else 0)
        first = end
        # each earlier stage needs a layer, and the first stage takes whatever is left
        while first > stage and (stage == 0 or first == end or cost + costs.layers[first - 1] <= bound):
            first -= 1
            cost += costs.layers[first]
        if cost > bound:
            return None
        stages.append(range(first, end))
        end = first
    return stages[::-1]
