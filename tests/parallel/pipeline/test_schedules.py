"""schedules: published orders, every schedule valid for every size it accepts, and suggestions for the others."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.errors import ConfigError
from megalith.parallel.pipeline import orders
from megalith.parallel.pipeline.dependencies import in_dependency_order
from megalith.parallel.pipeline.placement import Placement
from megalith.parallel.pipeline.plan import Action, Plan, Schedule
from megalith.parallel.pipeline.schedules import SCHEDULES, build_schedule, forward_only, placement_of, splits_backward
from megalith.parallel.pipeline.validate import validate

SHORT = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}


def written(plan: Plan) -> str:
    """For instance "F0 F1 B0": a letter and a micro-batch, with one apostrophe per chunk after the first."""
    return " ".join(f"{SHORT[action.kind]}{action.micro_batch}{chr(39) * action.chunk}" for action in plan)


def test_the_names_are_those_of_the_setting():
    assert SCHEDULES == ("gpipe", "1f1b", "interleaved", "zero_bubble", "zb_v")


def test_one_rank_has_the_plan_of_one_stage():
    one = build_schedule("1f1b", 1, 2).plans
    assert one == (
        (Action("forward", 0), Action("backward", 0), Action("forward", 1), Action("backward", 1, reduces=True)),
    )
    assert forward_only(Placement(1), 2).plans == ((Action("forward", 0), Action("forward", 1)),)


def test_gpipe_turns_back_when_all_micro_batches_are_forward():
    assert written(build_schedule("gpipe", 2, 3).plans[1]) == "F0 F1 F2 B0 B1 B2"


def test_1f1b_is_the_order_of_the_paper():
    # arXiv:2104.04473, figure 4, top: 4 devices, 8 micro-batches
    plans = [written(plan) for plan in build_schedule("1f1b", 4, 8).plans]
    assert plans[0] == "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"
    assert plans[1] == "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7"
    assert plans[3] == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"


def test_interleaved_is_the_order_of_the_paper():
    # arXiv:2104.04473, figure 4, bottom: 4 devices, 8 micro-batches, 2 chunks
    plans = [written(plan) for plan in build_schedule("interleaved", 4, 8, 2).plans]
    assert plans[0].startswith("F0 F1 F2 F3 F0' F1' F2' F3' F4 F5 F6 B0' F7 B1' F4' B2' F5' B3' F6' B0 F7' B1")
    assert plans[3].startswith("F0 F1 F2 F3 F0' B0' F1' B1' F2' B2' F3' B3' F4 B0 F5 B1 F6 B2 F7 B3 F4' B4'")


def test_groups_are_those_of_megatron():
    # Megatron-Core's tables for 5 micro-batches, 2 chunks, groups of 3; 5 forwards before the first backward
    plan = build_schedule("interleaved", 2, 5, 2, group_size=3).plans[0]
    forwards = [(action.micro_batch, action.chunk) for action in plan if action.kind == "forward"]
    assert forwards == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (4, 0), (3, 1), (4, 1)]
    chunks = [(action.chunk + 1) * (1 if action.kind == "forward" else -1) for action in plan]
    assert chunks == [1, 1, 1, 2, 2, 2, -2, 1, -2, 1, -2, 2, -1, 2, -1, -1, -2, -2, -1, -1]


def test_zero_bubble_is_zb_h1_of_the_paper():
    # as in arXiv:2401.10241, figure 3: each rank's W lags one micro-batch further than that of the previous rank
    plans = [written(plan) for plan in build_schedule("zero_bubble", 3, 4).plans]
    assert plans == [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]


def test_zb_v_goes_backward_as_soon_as_a_micro_batch_is_back_up():
    plans = [written(plan) for plan in build_schedule("zb_v", 2, 4, 2).plans]
    assert plans == [
        "F0 F1 F2 F0' I0' W0' F1' I1' W1' F3 I0 W0 F2' I2' W2' I1 W1 F3' I3' W3' I2 W2 I3 W3",
        "F0 F0' F1 F1' I0' W0' F2 I0 W0 F2' I1' W1' F3 I1 W1 F3' I2' W2' I2 I3' I3 W2 W3' W3",
    ]


def test_evaluation_goes_chunk_by_chunk_in_groups_of_as_many_micro_batches_as_ranks():
    looped = forward_only(Placement(2, 2), 5)
    assert [written(plan) for plan in looped.plans] == ["F0 F1 F0' F1' F2 F3 F4 F2' F3' F4'"] * 2
    assert [written(plan) for plan in forward_only(Placement(2, 2, "v"), 4).plans] == [
        "F0 F1 F2 F0' F3 F1' F2' F3'",
        "F0 F0' F1 F1' F2 F2' F3 F3'",
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_says_where_its_stages_lie_and_whether_it_splits_backwards(name):
    num_chunks = {"interleaved": 2, "zb_v": 2}.get(name, 1)
    schedule = build_schedule(name, 2, 4, num_chunks)
    assert placement_of(name, 2, num_chunks) == schedule.placement
    assert schedule.placement.place(2 * num_chunks - 1) == ((0, 1) if name == "zb_v" else (1, num_chunks - 1))
    kinds = {action.kind for plan in schedule.plans for action in plan}
    assert splits_backward(name) == ("backward_weight" in kinds) == ("backward" not in kinds)


def reducing(schedule: Schedule) -> list[list[str]]:
    return [[str(action) for action in plan if action.reduces] for plan in schedule.plans]


def test_gradients_are_reduced_in_the_last_backward_of_each_chunk():
    assert (
        reducing(build_schedule("interleaved", 2, 2, 2))
        == [["backward of micro-batch 1 in chunk 1", "backward of micro-batch 1 in chunk 0"]] * 2
    )
    assert reducing(build_schedule("zero_bubble", 2, 3)) == [["backward_weight of micro-batch 2 in chunk 0"]] * 2
    assert reducing(forward_only(Placement(2), 3)) == [[], []]


@st.composite
def sizes(draw) -> dict[str, int | str | None]:
    """Valid arguments for ``build_schedule``."""
    name, p = draw(st.sampled_from(SCHEDULES)), draw(st.integers(1, 8))
    if name != "interleaved":
        return {
            "name": name,
            "num_ranks": p,
            "num_microbatches": draw(st.integers(1, 20)),
            "num_chunks": 1 + (name == "zb_v"),
        }
    m = draw(st.integers(p, 20))
    fitting = [g for g in range(p, m + 1) if m % g == 0 or m % g >= p]
    return {
        **{"name": name, "num_ranks": p, "num_microbatches": m},
        **{"num_chunks": draw(st.integers(2, 4)), "group_size": draw(st.sampled_from(fitting))},
    }


@settings(max_examples=200)
@given(sizes())
def test_every_schedule_is_valid(sizes):
    validate(build_schedule(**sizes))


@settings(max_examples=100)
@given(st.integers(1, 8), st.integers(1, 20), st.integers(1, 4))
def test_every_evaluation_is_valid(p, m, v):
    for placement in (Placement(p, v), Placement(p, 2, "v")):
        schedule = forward_only(placement, m)
        validate(schedule)
        assert not schedule.has_backward


@settings(max_examples=200)
@given(st.integers(1, 8), st.integers(1, 20), st.integers(1, 24))
def test_sizes_of_groups_are_those_of_megatron_and_each_way_out_is_one(p, m, g):
    given_sizes = {"num_ranks": p, "num_microbatches": m, "num_chunks": 2, "group_size": g}
    if p <= g <= m and not 0 < m % g < p:
        build_schedule("interleaved", **given_sizes)
        return
    with pytest.raises(ConfigError, match=r"interleaved needs group_size from num_ranks") as refused:
        build_schedule("interleaved", **given_sizes)
    ways = re.findall(r"(?:use|or) (\w+=\d+(?: with \w+=\d+)?)", str(refused.value))
    assert ways
    for way in ways:
        changed = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", way)}
        build_schedule("interleaved", **{**given_sizes, **changed})


def test_groups_of_fewer_micro_batches_than_ranks_would_deadlock():
    order = [tuple(orders.interleaved(rank, orders.Sizes(p=3, m=3, v=2, g=1))) for rank in range(3)]
    with pytest.raises(
        ConfigError, match=r"deadlocks: rank 0 cannot run its action 5, forward of micro-batch 2 in chunk 1"
    ):
        list(in_dependency_order(Schedule(Placement(3, 2), 3, tuple(order))))


@pytest.mark.parametrize(
    ("name", "num_chunks", "message"),
    [
        ("gpipe", 2, "gpipe needs num_chunks=1; got 2, which works with interleaved, zb_v"),
        ("1f1b", 3, "1f1b needs num_chunks=1; got 3, which works with interleaved"),
        ("zero_bubble", 2, "zero_bubble needs num_chunks=1; got 2, which works with interleaved, zb_v"),
        ("interleaved", 1, "interleaved needs num_chunks=2 or more; got 1, which works with gpipe, 1f1b, zero_bubble"),
        ("zb_v", 3, "zb_v needs num_chunks=2; got 3, which works with interleaved"),
    ],
)
def test_another_number_of_chunks_is_refused_with_the_schedules_that_take_it(name, num_chunks, message):
    with pytest.raises(ConfigError) as refused:
        build_schedule(name, 4, 8, num_chunks)
    assert str(refused.value) == message


def test_what_cannot_be_built_is_refused():
    with pytest.raises(ConfigError, match=r"must be one of gpipe, 1f1b, interleaved, zero_bubble, zb_v; got '1F1B'"):
        build_schedule("1F1B", 4, 8)
    with pytest.raises(ConfigError, match=r"positive integers; got num_ranks=0, num_microbatches=2.0; use 1 or more"):
        build_schedule("1f1b", 0, 2.0)
    with pytest.raises(
        ConfigError, match=r"group_size applies only to interleaved; got 4 for 1f1b, which has no groups; leave"
    ):
        build_schedule("1f1b", 4, 8, group_size=4)
    with pytest.raises(ConfigError, match=r"positive integers; got group_size=0"):
        build_schedule("interleaved", 4, 8, 2, group_size=0)
    with pytest.raises(ConfigError, match=r"got group_size=4, which leaves 1; use group_size=5 or num_microbatches=8"):
        build_schedule("interleaved", 4, 5, 2)
    with pytest.raises(ConfigError, match=r"got group_size=9, which leaves 1; use group_size=5 or num_microbatches=13"):
        build_schedule("interleaved", 4, 10, 2, group_size=9)
    with pytest.raises(ConfigError, match=r"got group_size=2; use num_microbatches=4 with group_size=4$"):
        build_schedule("interleaved", 4, 3, 2, group_size=2)
    with pytest.raises(ConfigError, match=r"positive integers; got num_microbatches=0"):
        forward_only(Placement(2), 0)
