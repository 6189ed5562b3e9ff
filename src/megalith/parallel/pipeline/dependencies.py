"""What each action of a schedule depends on: results of the same rank, and messages from other ranks.

    forward                     the output of the previous stage
    backward, backward_input    its own forward, and the input gradient of the next stage
    backward_weight             its own backward_input

A rank runs its actions in order and blocks until the next one has what it needs. Sending never blocks.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from megalith.errors import ConfigError
from megalith.parallel.pipeline.placement import Placement
from megalith.parallel.pipeline.plan import Action, Schedule

__all__ = ["Result", "destination", "in_dependency_order", "needs", "receives", "result_of"]


class Result(NamedTuple):
    """What other actions need from a completed one: the output of a forward, or the input gradient of a backward.

    If the stage that needs it is on another rank, it is sent there as a message.
    """

    kind: Literal["output", "input_gradient"]
    micro_batch: int
    rank: int
    chunk: int

    def __str__(self) -> str:
        kind = self.kind.replace("_", " ")
        return f"the {kind} of micro-batch {self.micro_batch} from rank {self.rank}, chunk {self.chunk}"


def result_of(rank: int, action: Action) -> Result | None:
    """Returns the result of ``action`` on ``rank``; None for a backward_weight, which no action depends on."""
    if action.kind == "backward_weight":
        return None
    return Result("output" if action.kind == "forward" else "input_gradient", action.micro_batch, rank, action.chunk)


def destination(placement: Placement, result: Result) -> tuple[int, int] | None:
    """Returns the place of the neighbouring stage that needs ``result``; None at either end of the model."""
    neighbour = placement.next if result.kind == "output" else placement.previous
    return neighbour(result.rank, result.chunk)


def needs(placement: Placement, rank: int, action: Action) -> list[Result]:
    """Returns the results that ``action`` on ``rank`` depends on."""
    if action.kind == "backward_weight":
        return [Result("input_gradient", action.micro_batch, rank, action.chunk)]
    if action.kind == "forward":
        previous = placement.previous(rank, action.chunk)
        return [Result("output", action.micro_batch, *previous)] if previous else []
    own = Result("output", action.micro_batch, rank, action.chunk)
    following = placement.next(rank, action.chunk)
    return [own, Result("input_gradient", action.micro_batch, *following)] if following else [own]


def receives(schedule: Schedule, rank: int) -> dict[int, list[Result]]:
    """Returns the messages that ``rank`` receives from each other rank, in the order in which that rank sends them.

    NCCL matches sends and receives between two ranks by their order, so receives must be posted in the sender's order,
    even if ``rank`` uses the messages in a different order.
    """
    messages: dict[int, list[Result]] = {}
    for source, plan in enumerate(schedule.plans):
        for action in plan:
            if source == rank or (result := result_of(source, action)) is None:
                continue
            place = destination(schedule.placement, result)
            if place is not None and place[0] == rank:
                messages.setdefault(source, []).append(result)
    return messages


def in_dependency_order(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Yields every (rank, action), in the order of each rank's plan and after the actions that it depends on.

    Raises:
        ConfigError: a deadlock, once no rank can proceed.
    """
    position = [0] * len(schedule.plans)
    done: set[Result] = set()
    waiting: dict[Result, list[int]] = {}
    runnable = list(range(len(schedule.plans)))
    while runnable:
        rank = runnable.pop()
        plan = schedule.plans[rank]
        while position[rank] < len(plan):
            action = plan[position[rank]]
            missing = next((need for need in needs(schedule.placement, rank, action) if need not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            yield rank, action
            position[rank] += 1
            if (result := result_of(rank, action)) is not None:
                done.add(result)
                runnable += waiting.pop(result, [])
    if waiting:
        raise ConfigError(_deadlock(schedule, position, {rank: on for on, ranks in waiting.items() for rank in ranks}))


def _deadlock(schedule: Schedule, position: list[int], waits_for: dict[int, Result]) -> str:
    """Describes the cycle of ranks that wait for one another, from the first blocked rank until it closes."""
    chain = [min(waits_for)]
    while (rank := waits_for[chain[-1]].rank) in waits_for and rank not in chain:
        chain.append(rank)
    links = [
        f"rank {rank} cannot run its action {position[rank]}, {schedule.plans[rank][position[rank]]}, before it has "
        f"{waits_for[rank]}"
        for rank in chain
    ]
    return (
        f"the schedule deadlocks: {'; '.join(links)}; order the plans so that each action comes after those that it "
        "depends on"
    )
