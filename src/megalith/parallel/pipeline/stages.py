"""Which layers each stage of a pipeline has."""

from collections.abc import Sequence
from dataclasses import dataclass

from megalith.errors import ConfigError

__all__ = ["ModelCosts", "balanced_stages", "listed_stages"]


@dataclass(frozen=True)
class ModelCosts:
    """What each part of a model costs in a step, in one unit of any kind, counted or measured."""

    layers: tuple[int, ...]
    embedding: int
    head: int


def balanced_stages(costs: ModelCosts, num_stages: int) -> list[range]:
    """The layers of each stage, every stage with one at least, so that the most expensive stage is as cheap as can be.

    Where stages may share layers in several such ways, later ones take more: the activations of fewer micro-batches
    wait in them.

    Raises:
        ConfigError: fewer layers than stages.
    """
    if len(costs.layers) < num_stages:
        raise ConfigError(
            f"{num_stages} stages need a layer each, and the model has {len(costs.layers)}; use fewer stages "
            "(parallel.pipeline, parallel.virtual)"
        )
    lowest, highest = 0, sum(costs.layers) + costs.embedding + costs.head
    while lowest < highest:  # the least bound that a stage's cost can be kept under
        middle = (lowest + highest) // 2
        if _within(costs, num_stages, middle) is None:
            lowest = middle + 1
        else:
            highest = middle
    stages = _within(costs, num_stages, lowest)
    assert stages is not None, "a bound of the whole cost is always kept"
    return stages


def listed_stages(num_layers: Sequence[int]) -> list[range]:
    """The layers of stages that have so many of them, in their order."""
    firsts = [sum(num_layers[:stage]) for stage in range(len(num_layers))]
    return [range(first, first + number) for first, number in zip(firsts, num_layers, strict=True)]


def _within(costs: ModelCosts, num_stages: int, bound: int) -> list[range] | None:
    """Stages that cost ``bound`` at most, filled from the last; None if there are none."""
    stages: list[range] = []
    end = len(costs.layers)
    for stage in reversed(range(num_stages)):
        cost = (costs.head if stage == num_stages - 1 else 0) + (costs.embedding if stage == 0 else 0)
        first = end
        # the stages before need a layer each, and the first takes whatever is left
        while first > stage and (stage == 0 or first == end or cost + costs.layers[first - 1] <= bound):
            first -= 1
            cost += costs.layers[first]
        if cost > bound:
            return None
        stages.append(range(first, end))
        end = first
    return stages[::-1]
