"""Checks that a schedule runs every micro-batch through every stage exactly once, and cannot deadlock."""

from collections import Counter
from collections.abc import Sequence
from typing import get_args

from megalith.errors import ConfigError
from megalith.parallel.pipeline.dependencies import in_dependency_order
from megalith.parallel.pipeline.plan import Action, Kind, Schedule

__all__ = ["validate"]

_FORWARD: list[dict[Kind, int]] = [{"forward": 1}]
_FORWARD_AND_BACKWARD: list[dict[Kind, int]] = [
    {"forward": 1, "backward": 1},
    {"forward": 1, "backward_input": 1, "backward_weight": 1},
]


def validate(schedule: Schedule) -> None:
    """Raises if ``schedule`` is incomplete or would deadlock; it needs no process group.

    Raises:
        ConfigError: a micro-batch does not run through a chunk once forward and once backward, whole or split (forward
            only if the schedule has no backward at all); the gradients of a chunk are not reduced exactly once, in the
            last action that adds to them; or ranks wait for one another. The message names the rank and the action.
    """
    if len(schedule.plans) != schedule.placement.num_ranks:
        raise ConfigError(
            f"a schedule needs one plan for each of {schedule.placement.num_ranks} ranks; got {len(schedule.plans)}"
        )
    has_backward = schedule.has_backward
    for rank, plan in enumerate(schedule.plans):
        _check_counts(schedule, rank, plan, has_backward)
        for chunk in range(schedule.placement.num_chunks):
            _check_reduction(rank, chunk, [action for action in plan if action.chunk == chunk])
    for _ in in_dependency_order(schedule):
        pass  # it raises if there is a deadlock


def _check_counts(schedule: Schedule, rank: int, plan: Sequence[Action], has_backward: bool) -> None:
    micro_batches, chunks = range(schedule.num_microbatches), range(schedule.placement.num_chunks)
    for action in plan:
        if action.micro_batch not in micro_batches or action.chunk not in chunks:
            raise ConfigError(
                f"rank {rank} has micro-batches 0 to {len(micro_batches) - 1} and chunks 0 to {len(chunks) - 1}; got "
                f"{action}"
            )
    counts = Counter((action.micro_batch, action.chunk, action.kind) for action in plan)
    once = _FORWARD_AND_BACKWARD if has_backward else _FORWARD
    for k in micro_batches:
        for chunk in chunks:
            found = {kind: counts[k, chunk, kind] for kind in get_args(Kind) if counts[k, chunk, kind]}
            if found not in once:
                raise ConfigError(
                    f"rank {rank} must take micro-batch {k} through chunk {chunk} once "
                    + (
                        "forward and once backward (or backward_input and backward_weight)"
                        if has_backward
                        else "forward"
                    )
                    + f"; got {', '.join(f'{count} {kind}' for kind, count in found.items()) or 'nothing'}"
                )


def _check_reduction(rank: int, chunk: int, plan: Sequence[Action]) -> None:
    """``plan``: the rank's actions on this chunk."""
    wanted = [action for action in plan if action.adds_to_gradients][-1:]
    found = [action for action in plan if action.reduces]
    if found != wanted:
        gradients = f"reduce the gradients of chunk {chunk}"
        raise ConfigError(
            f"rank {rank} must "
            + (
                f"{gradients} once, in its last action that adds to them, {wanted[0]}"
                if wanted
                else f"never {gradients}, which has no backward"
            )
            + f"; it reduces them in {', '.join(map(str, found)) or 'no action'}"
        )
