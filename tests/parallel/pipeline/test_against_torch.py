"""Orders of actions, rank by rank, compared with torch.distributed.pipelining's schedules."""

from unittest import mock

import pytest
from torch.distributed.pipelining import schedules as theirs

from megalith.parallel.pipeline.placement import Placement
from megalith.parallel.pipeline.plan import Plan, Schedule
from megalith.parallel.pipeline.schedules import build_schedule

KINDS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}
RANKS, MICRO_BATCHES = range(1, 9), range(1, 21)


def steps(plan: Plan) -> list[tuple[str, int, int]]:
    return [(action.kind, action.micro_batch, action.chunk) for action in plan]


def orders(schedule: Schedule) -> list[list[tuple[str, int, int]]]:
    return [steps(plan) for plan in schedule.plans]


def fake_stage(p: int, num_chunks: int, rank: int = 0) -> mock.MagicMock:
    """A torch stage without model and process group, which sends and receives nothing."""
    stage = mock.MagicMock(group_rank=rank, group_size=p, num_stages=p * num_chunks, stage_index=rank, is_last=False)
    stage.submod = None
    for operation in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(stage, operation).return_value = []
    return stage


def planned(schedule_class: type, placement: Placement, m: int) -> list[list[tuple[str, int, int]]]:
    """The order tables of torch's table-driven schedules; raises ValueError if torch refuses this m."""
    stages = [fake_stage(placement.num_ranks, placement.num_chunks) for _ in range(placement.num_chunks)]
    table = schedule_class(stages, m).pipeline_order
    return [
        [
            (KINDS[action.computation_type.value], action.microbatch_index, placement.place(action.stage_index)[1])
            for action in table[rank]
            if action is not None
        ]
        for rank in range(placement.num_ranks)
    ]


def executed(schedule_class: type, p: int, m: int) -> list[list[tuple[str, int, int]]]:
    """The calls that torch's single-stage schedules make; for these, the code defines the order."""
    found = []
    for rank in range(p):
        stage = fake_stage(p, 1, rank)
        schedule = schedule_class(stage, m, loss_fn=mock.Mock())
        with mock.patch.object(schedule, "_initialize_stage"):
            schedule._step_microbatches([()] * m, [{}] * m, [None] * m)
        calls = {"forward_one_chunk": "forward", "backward_one_chunk": "backward"}
        found.append([(calls[name], args[0], 0) for name, args, _ in stage.method_calls if name in calls])
    return found


@pytest.mark.parametrize("p", RANKS)
def test_gpipe_is_theirs(p):
    for m in MICRO_BATCHES:
        assert orders(build_schedule("gpipe", p, m)) == executed(theirs.ScheduleGPipe, p, m)


@pytest.mark.parametrize("p", RANKS)
def test_1f1b_is_theirs(p):
    for m in range(p, 21):  # they refuse fewer micro-batches than ranks
        assert orders(build_schedule("1f1b", p, m)) == executed(theirs.Schedule1F1B, p, m)


@pytest.mark.parametrize("p", RANKS)
def test_interleaved_is_theirs_with_their_size_of_groups(p):
    compared = 0
    for m in range(p, 21):
        for v in (2, 3, 4):
            num_rounds = m // p
            if m % num_rounds:
                continue  # they refuse it, where we allow a last group of another size
            ours = build_schedule("interleaved", p, m, v, group_size=m // num_rounds)
            assert orders(ours) == planned(theirs.ScheduleInterleaved1F1B, Placement(p, v), m)
            compared += 1
    assert compared >= 21


@pytest.mark.parametrize("p", RANKS)
def test_zero_bubble_is_theirs_with_one_chunk_per_rank(p):
    compared = 0
    for m in MICRO_BATCHES:
        if m % max(1, m // p) == 0:
            ours = build_schedule("zero_bubble", p, m)
            assert orders(ours) == planned(theirs.ScheduleInterleavedZeroBubble, Placement(p), m)
            compared += 1
    assert compared >= 10


@pytest.mark.parametrize("p", RANKS)
def test_zb_v_is_theirs(p):
    for m in MICRO_BATCHES:
        ours = build_schedule("zb_v", p, m, 2)
        assert orders(ours) == planned(theirs.ScheduleZBVZeroBubble, ours.placement, m)
