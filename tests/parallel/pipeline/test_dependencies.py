"""dependencies: what actions wait for, messages in sending order, and deadlocks exactly if there is a cycle."""

from graphlib import CycleError, TopologicalSorter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.errors import ConfigError
from megalith.parallel.pipeline.dependencies import Result, destination, in_dependency_order, needs, receives, result_of
from megalith.parallel.pipeline.placement import Placement
from megalith.parallel.pipeline.plan import Action, Schedule
from megalith.parallel.pipeline.schedules import build_schedule, forward_only

BUILT = [
    build_schedule("1f1b", 4, 6),
    build_schedule("interleaved", 3, 6, 2),
    build_schedule("interleaved", 2, 4, 3),
    build_schedule("zero_bubble", 4, 5),
    build_schedule("zb_v", 3, 5, 2),
    forward_only(Placement(3, 2), 7),
]
IN_A_V = Placement(2, 2, "v")  # stages 0 and 3 on rank 0, 1 and 2 on rank 1


def output(rank: int, chunk: int) -> Result:
    return Result("output", 5, rank, chunk)


def gradient(rank: int, chunk: int) -> Result:
    return Result("input_gradient", 5, rank, chunk)


@pytest.mark.parametrize(
    ("rank", "action", "wanted"),
    [
        (0, Action("forward", 5, 0), []),
        (1, Action("forward", 5, 0), [output(0, 0)]),
        (1, Action("forward", 5, 1), [output(1, 0)]),
        (0, Action("forward", 5, 1), [output(1, 1)]),
        (0, Action("backward", 5, 1), [output(0, 1)]),
        (1, Action("backward_input", 5, 1), [output(1, 1), gradient(0, 1)]),
        (1, Action("backward", 5, 0), [output(1, 0), gradient(1, 1)]),
        (1, Action("backward_weight", 5, 0), [gradient(1, 0)]),
    ],
)
def test_an_action_waits_for_its_neighbour_and_its_own_forward(rank, action, wanted):
    assert needs(IN_A_V, rank, action) == wanted


def test_a_forward_leaves_its_output_for_the_next_stage_and_a_backward_its_gradient_for_the_previous():
    assert result_of(1, Action("forward", 5, 1)) == output(1, 1)
    assert result_of(1, Action("backward", 5, 1)) == result_of(1, Action("backward_input", 5, 1)) == gradient(1, 1)
    assert result_of(1, Action("backward_weight", 5, 1)) is None
    assert destination(IN_A_V, output(1, 1)) == (0, 1)
    assert destination(IN_A_V, gradient(1, 1)) == (1, 0)
    assert destination(IN_A_V, output(0, 1)) is None
    assert destination(IN_A_V, gradient(0, 0)) is None


def test_messages_come_in_the_order_of_their_sender():
    # two ranks with two chunks each: rank 0 sends rank 1 the outputs of both chunks and the gradients of chunk 1
    schedule = build_schedule("interleaved", 2, 2, 2)
    assert receives(schedule, 1) == {
        0: [
            *[Result("output", k, 0, 0) for k in (0, 1)],
            *[Result("output", k, 0, 1) for k in (0, 1)],
            *[Result("input_gradient", k, 0, 1) for k in (0, 1)],
        ]
    }
    # the receiver may use them in another order
    plan = (Action("forward", 1), Action("forward", 0))
    other = Schedule(Placement(2), 2, (plan[::-1], plan))
    assert receives(other, 1) == {0: [Result("output", 0, 0, 0), Result("output", 1, 0, 0)]}
    assert receives(other, 0) == {}


@pytest.mark.parametrize("schedule", BUILT, ids=lambda schedule: str(schedule.placement))
def test_each_message_is_received_once_and_is_what_some_action_needs(schedule):
    for rank, plan in enumerate(schedule.plans):
        wanted = [need for action in plan for need in needs(schedule.placement, rank, action) if need.rank != rank]
        inbox = receives(schedule, rank)
        assert sorted(wanted) == sorted(message for messages in inbox.values() for message in messages)
        for source, messages in inbox.items():
            made = [result_of(source, action) for action in schedule.plans[source]]
            assert messages == [result for result in made if result in set(wanted)]


def has_cycle(schedule: Schedule) -> bool:
    """Whether actions wait for each other in a cycle, by stage, using the standard library's graph search."""
    graph = TopologicalSorter()
    last = schedule.placement.num_stages - 1
    for rank, plan in enumerate(schedule.plans):
        before = None
        for action in plan:
            stage, k = schedule.placement.stage(rank, action.chunk), action.micro_batch
            node = (action.kind.removesuffix("_input"), stage, k)
            if before is not None:
                graph.add(node, before)
            if node[0] == "forward" and stage > 0:
                graph.add(node, ("forward", stage - 1, k))
            if node[0] == "backward":
                graph.add(node, ("forward", stage, k))
                if stage < last:
                    graph.add(node, ("backward", stage + 1, k))
            if node[0] == "backward_weight":
                graph.add(node, ("backward", stage, k))
            before = node
    try:
        graph.prepare()
    except CycleError:
        return True
    return False


@settings(max_examples=300)
@given(st.sampled_from(BUILT), st.data())
def test_a_deadlock_is_found_exactly_where_actions_wait_in_a_circle(schedule, data):
    plans = [list(plan) for plan in schedule.plans]
    for _ in range(data.draw(st.integers(0, 6))):
        plan = data.draw(st.sampled_from(plans))
        index = data.draw(st.integers(0, len(plan) - 1))
        plan.insert(data.draw(st.integers(0, len(plan) - 1)), plan.pop(index))
    changed = Schedule(schedule.placement, schedule.num_microbatches, tuple(map(tuple, plans)))
    if has_cycle(changed):
        with pytest.raises(ConfigError, match=r"^the schedule deadlocks: rank \d cannot run its action"):
            list(in_dependency_order(changed))
    else:
        order = list(in_dependency_order(changed))
        assert [[action for rank, action in order if rank == r] for r in range(len(plans))] == plans


def test_only_ranks_that_wait_in_the_circle_or_for_it_are_named():
    forward_first = (Action("forward", 0), Action("backward", 0))
    plans = (forward_first[::-1], forward_first, forward_first)
    with pytest.raises(ConfigError) as refused:
        list(in_dependency_order(Schedule(Placement(3), 1, plans)))
    assert str(refused.value) == (
        "the schedule deadlocks: rank 0 cannot run its action 0, backward of micro-batch 0 in chunk 0, before it has "
        "the output of micro-batch 0 from rank 0, chunk 0; order the plans so that each action comes after those "
        "that it depends on"
    )
