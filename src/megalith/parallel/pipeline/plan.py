"""What the ranks of a pipeline run in one step, action by action, as data."""

from dataclasses import dataclass
from typing import Literal

from megalith.parallel.pipeline.placement import Placement

__all__ = ["Action", "Kind", "Plan", "Schedule"]

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]


@dataclass(frozen=True)
class Action:
    """One micro-batch through one of the rank's model chunks, forward or backward.

    Attributes:
        kind: "backward" computes the gradients of inputs and weights. Split in two, "backward_input" computes those of
            the inputs, for which the previous stage waits, and "backward_weight" those of the weights, any time later.
        reduces: gradients are reduced over data-parallel ranks in this action: once per chunk, in the last that adds to
            the gradients of its weights.
    """

    kind: Kind
    micro_batch: int
    chunk: int = 0
    reduces: bool = False

    @property
    def adds_to_gradients(self) -> bool:
        """Whether it computes gradients of the chunk's weights."""
        return self.kind in ("backward", "backward_weight")

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.micro_batch} in chunk {self.chunk}"


Plan = tuple[Action, ...]


@dataclass(frozen=True, eq=False)  # hashed by identity: what follows from one is worked out once
class Schedule:
    """A step of the whole pipeline: ``plans[rank]`` takes ``num_microbatches`` through the chunks of that rank."""

    placement: Placement
    num_microbatches: int
    plans: tuple[Plan, ...]

    @property
    def has_backward(self) -> bool:
        """Whether it is for training; forwards then keep activations for their backwards."""
        return any(action.kind != "forward" for plan in self.plans for action in plan)
