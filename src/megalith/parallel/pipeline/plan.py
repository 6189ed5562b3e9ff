"""A plan: what a rank does in one step, action after action, as data."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["Action", "Plan", "one_stage_plan"]


@dataclass(frozen=True)
class Action:
    """One micro-batch through one of the rank's model chunks.

    ``reduces``: of a backward, whether gradients are reduced over data-parallel ranks in it: once a chunk, in its last.
    """

    kind: Literal["forward", "backward"]
    micro_batch: int
    chunk: int = 0
    reduces: bool = False


Plan = tuple[Action, ...]


def one_stage_plan(num_microbatches: int, *, backward: bool) -> Plan:
    """The plan of a rank that has the whole model: each micro-batch forward, and backward at once if at all."""
    actions: list[Action] = []
    for index in range(num_microbatches):
        actions.append(Action("forward", index))
        if backward:
            actions.append(Action("backward", index, reduces=index == num_microbatches - 1))
    return tuple(actions)
