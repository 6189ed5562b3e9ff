"""The actions that the ranks of a pipeline run in one step, as data."""

from dataclasses import dataclass
from typing import Literal

from megalith.parallel.pipeline.placement import Placement

__all__ = ["Action", "Kind", "Plan", "Schedule"]

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]


@dataclass(frozen=True)
class Action:
    """One micro-batch through one of the rank's model chunks, forward or backward.

    Attributes:
        kind: "backward" computes the gradients of inputs and weights. A split backward consists of "backward_input" for
            the inputs, which the previous stage waits for, and "backward_weight" for the weights, at any later time.
        reduces: this action reduces gradients over data-parallel ranks; true once per chunk, for the last action that
            adds to the gradients of its weights.
    """

    kind: Kind
    micro_batch: int
    chunk: int = 0
    reduces: bool = False

    @property
    def adds_to_gradients(self) -> bool:
        """Whether the action computes gradients of the chunk's weights."""
        return self.kind in ("backward", "backward_weight")

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.micro_batch} in chunk {self.chunk}"


Plan = tuple[Action, ...]


@dataclass(frozen=True, eq=False)  # hashed by identity, so that results derived from a schedule can be cached
class Schedule:
    """A step of the whole pipeline: ``plans[rank]`` runs ``num_microbatches`` through the chunks of that rank."""

    placement: Placement
    num_microbatches: int
    plans: tuple[Plan, ...]

    @property
    def has_backward(self) -> bool:
        """Whether the schedule is for training, so that forwards keep activations for their backwards."""
        return any(action.kind != "forward" for plan in self.plans for action in plan)
