"""Simulates the time and memory of a schedule from the costs of its actions.

A rank starts an action when its previous one has ended and everything it depends on has arrived (``dependencies``).
Communication overlaps with computation, with any number of messages in flight at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from megalith.errors import ConfigError
from megalith.parallel.pipeline.dependencies import Result, in_dependency_order, needs, result_of
from megalith.parallel.pipeline.plan import Action, Kind, Schedule

__all__ = ["Costs", "Simulation", "simulate"]

_LIVE = {"forward": 1, "backward": -1, "backward_input": 0, "backward_weight": -1}


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The cost of one micro-batch in one stage, in any units of time and memory.

    Attributes:
        forward, backward_input, backward_weight: time; an unsplit backward takes the sum of the last two.
        activations: memory that a forward keeps for its backward.
        kept_for_weights: the part of it that is kept after backward_input for backward_weight.
    """

    forward: float = 1
    backward_input: float = 1
    backward_weight: float = 1
    activations: float = 1
    kept_for_weights: float = 1

    def time(self, kind: Kind) -> float:
        """Returns the time that an action takes."""
        return {
            "forward": self.forward,
            "backward": self.backward_input + self.backward_weight,
            "backward_input": self.backward_input,
            "backward_weight": self.backward_weight,
        }[kind]

    def memory(self, kind: Kind) -> float:
        """Returns the memory that an action adds; negative if it frees memory."""
        return {
            "forward": self.activations,
            "backward": -self.activations,
            "backward_input": self.kept_for_weights - self.activations,
            "backward_weight": -self.kept_for_weights,
        }[kind]


@dataclass(frozen=True)
class Simulation:
    """One step of a pipeline; every list is by rank.

    Attributes:
        starts: when each action of the rank's plan starts.
        ends: when its last action ends.
        busy: total time of its actions.
        peak_live_activations: the largest number of pairs (micro-batch, chunk) at one time whose forward is done and
            whose backward, of inputs and weights, is not.
        peak_memory: the most memory that these take at one time.
    """

    starts: list[list[float]]
    ends: list[float]
    busy: list[float]
    peak_live_activations: list[int]
    peak_memory: list[float]

    @property
    def finish(self) -> float:
        """The time at which the last rank ends."""
        return max(self.ends)

    @property
    def idle(self) -> list[float]:
        """Time during which each rank runs no action, until the last rank ends."""
        return [self.finish - busy for busy in self.busy]

    @property
    def bubble(self) -> float:
        """Idle time over busy time, summed over all ranks."""
        return sum(self.idle) / sum(self.busy)


def simulate(schedule: Schedule, costs: Costs | Sequence[Costs], *, communication: float = 0) -> Simulation:
    """Computes the times and memory of ``schedule``; exact if costs are integers or fractions.

    Args:
        costs: one for all stages, or a sequence with one per stage.
        communication: time from the end of an action until another rank can use its result.

    Raises:
        ConfigError: a deadlock, or costs for another number of stages.
    """
    placement = schedule.placement
    by_stage = [costs] * placement.num_stages if isinstance(costs, Costs) else costs
    if len(by_stage) != placement.num_stages:
        raise ConfigError(
            f"costs must have one entry per stage ({placement.num_stages}); got {len(by_stage)}; pass a single Costs "
            "if all stages cost the same"
        )

    def costs_of(rank: int, action: Action) -> Costs:
        return by_stage[placement.stage(rank, action.chunk)]

    starts: list[list[float]] = [[] for _ in schedule.plans]
    ends: list[float] = [0 for _ in schedule.plans]
    busy: list[float] = [0 for _ in schedule.plans]
    made: dict[Result, float] = {}
    for rank, action in in_dependency_order(schedule):
        arrivals = [made[need] + (communication if need.rank != rank else 0) for need in needs(placement, rank, action)]
        start = max([ends[rank], *arrivals])
        time = costs_of(rank, action).time(action.kind)
        starts[rank].append(start)
        ends[rank] = start + time
        busy[rank] += time
        if (result := result_of(rank, action)) is not None:
            made[result] = ends[rank]
    plans = schedule.plans if schedule.has_backward else ((),) * placement.num_ranks  # else nothing is kept
    return Simulation(
        starts,
        ends,
        busy,
        [max(accumulate(_LIVE[action.kind] for action in plan), default=0) for plan in plans],
        [
            max(accumulate(costs_of(rank, action).memory(action.kind) for action in plan), default=0)
            for rank, plan in enumerate(plans)
        ],
    )
