"""validate: plans with missing, repeated or misplaced actions, and deadlocks, are refused with their names."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from megalith.errors import ConfigError
from megalith.parallel.pipeline.placement import Placement
from megalith.parallel.pipeline.plan import Action, Schedule
from megalith.parallel.pipeline.schedules import build_schedule, forward_only
from megalith.parallel.pipeline.validate import validate

FORWARD = [Action("forward", k) for k in range(2)]
BACKWARD = [Action("backward", k) for k in range(2)]


def with_plan(schedule: Schedule, rank: int, change: Callable[[list[Action]], list[Action]]) -> Schedule:
    plans = list(schedule.plans)
    plans[rank] = tuple(change(list(plans[rank])))
    return replace(schedule, plans=tuple(plans))


def without(kind: str, micro_batch: int) -> Callable[[list[Action]], list[Action]]:
    return lambda plan: [action for action in plan if (action.kind, action.micro_batch) != (kind, micro_batch)]


def test_a_deadlock_is_refused_with_who_waits_for_whom():
    # 1F1B on rank 0; rank 1 runs its forwards in the other order, while rank 0 can send the second micro-batch only
    # after the first has come back
    first = (FORWARD[0], BACKWARD[0], FORWARD[1], replace(BACKWARD[1], reduces=True))
    second = (FORWARD[1], FORWARD[0], BACKWARD[0], replace(BACKWARD[1], reduces=True))
    with pytest.raises(ConfigError) as refused:
        validate(Schedule(Placement(2), 2, (first, second)))
    assert str(refused.value) == (
        "the schedule deadlocks: rank 0 cannot run its action 1, backward of micro-batch 0 in chunk 0, before it has "
        "the input gradient of micro-batch 0 from rank 1, chunk 0; rank 1 cannot run its action 0, forward of "
        "micro-batch 1 in chunk 0, before it has the output of micro-batch 1 from rank 0, chunk 0; order the "
        "plans so that each action comes after those that it depends on"
    )


def test_ranks_may_do_micro_batches_in_different_orders_as_sending_does_not_block():
    first = (FORWARD[0], FORWARD[1], BACKWARD[0], replace(BACKWARD[1], reduces=True))
    second = (FORWARD[1], FORWARD[0], BACKWARD[1], replace(BACKWARD[0], reduces=True))
    validate(Schedule(Placement(2), 2, (first, second)))


def test_a_backward_before_its_forward_is_refused():
    backwards = with_plan(build_schedule("1f1b", 2, 2), 1, lambda plan: [plan[1], plan[0], *plan[2:]])
    with pytest.raises(
        ConfigError, match=r"deadlocks: rank 0 .*; rank 1 cannot run its action 0, backward of micro-batch 0"
    ):
        validate(backwards)


def test_a_weight_backward_before_that_of_the_inputs_is_refused():
    early = with_plan(build_schedule("zero_bubble", 1, 1), 0, lambda plan: [plan[0], plan[2], plan[1]])
    with pytest.raises(ConfigError) as refused:
        validate(early)
    assert (
        "rank 0 cannot run its action 1, backward_weight of micro-batch 0 in chunk 0, before it has the input"
        in str(refused.value)
    )


def test_chunks_of_a_rank_wait_for_each_other_too():
    turned = with_plan(forward_only(Placement(1, 2), 1), 0, lambda plan: plan[::-1])
    with pytest.raises(
        ConfigError, match=r"deadlocks: rank 0 cannot run its action 0, forward of micro-batch 0 in chunk 1"
    ):
        validate(turned)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("backward", 1), "rank 1 must take micro-batch 1 through chunk 0 once forward and once backward (or "),
        (without("forward", 1), "; got 1 backward"),
        (lambda plan: [*plan, BACKWARD[0]], "; got 1 forward, 2 backward"),
        (lambda plan: [*plan, Action("backward_weight", 2)], "; got 1 forward, 1 backward, 1 backward_weight"),
        (lambda plan: [*plan[:-1], Action("backward_input", 2)], "; got 1 forward, 1 backward_input"),
        (lambda plan: [], "rank 1 must take micro-batch 0 through chunk 0 once forward and once backward"),
        (lambda plan: [*plan, Action("forward", 3)], "got forward of micro-batch 3 in chunk 0"),
        (
            lambda plan: [*plan, Action("forward", 0, 1)],
            "rank 1 has micro-batches 0 to 2 and chunks 0 to 0; got forward",
        ),
    ],
)
def test_what_is_missing_or_too_much_is_named(change, message):
    with pytest.raises(ConfigError) as refused:
        validate(with_plan(build_schedule("1f1b", 2, 3), 1, change))
    assert message in str(refused.value)


def test_a_plan_for_each_rank_is_needed():
    schedule = build_schedule("1f1b", 2, 3)
    with pytest.raises(ConfigError, match=r"one plan for each of 2 ranks; got 1"):
        validate(replace(schedule, plans=schedule.plans[:1]))


def marked(*marks: str) -> Callable[[list[Action]], list[Action]]:
    return lambda plan: [replace(action, reduces=str(action) in marks) for action in plan]


@pytest.mark.parametrize(
    ("name", "marks", "found"),
    [
        ("1f1b", [], "no action"),
        ("1f1b", ["backward of micro-batch 1 in chunk 0"], "backward of micro-batch 1 in chunk 0"),
        ("1f1b", ["forward of micro-batch 2 in chunk 0"], "forward of micro-batch 2 in chunk 0"),
        (
            "1f1b",
            ["backward of micro-batch 1 in chunk 0", "backward of micro-batch 2 in chunk 0"],
            "backward of micro-batch 1 in chunk 0, backward of micro-batch 2 in chunk 0",
        ),
        ("zero_bubble", ["backward_input of micro-batch 2 in chunk 0"], "backward_input of micro-batch 2 in chunk 0"),
    ],
)
def test_gradients_are_reduced_once_in_the_last_action_that_adds_to_them(name, marks, found):
    last = "backward_weight" if name == "zero_bubble" else "backward"
    with pytest.raises(ConfigError) as refused:
        validate(with_plan(build_schedule(name, 2, 3), 1, marked(*marks)))
    assert str(refused.value) == (
        f"rank 1 must reduce the gradients of chunk 0 once, in its last action that adds to them, {last} of "
        f"micro-batch 2 in chunk 0; it reduces them in {found}"
    )


def test_an_evaluation_reduces_nothing():
    with pytest.raises(
        ConfigError,
        match=r"must never reduce the gradients of chunk 0, .*; it reduces them in forward of micro-batch 1",
    ):
        validate(with_plan(forward_only(Placement(2), 2), 0, marked("forward of micro-batch 1 in chunk 0")))
