"""simulate: exactly the papers' bubbles and peaks, a step by hand, stages and messages of different cost."""

from fractions import Fraction

import pytest

from megalith.errors import ConfigError
from megalith.parallel.pipeline.placement import Placement
from megalith.parallel.pipeline.plan import Action, Schedule
from megalith.parallel.pipeline.schedules import build_schedule, forward_only
from megalith.parallel.pipeline.simulate import Costs, Simulation, simulate

RANKS, MICRO_BATCHES = range(1, 9), range(1, 21)
UNIT = Costs()  # F = I = W, so a whole backward takes as long as two forwards
AS_LONG_AS_FORWARD = Costs(forward=2)
EXACT = [UNIT, AS_LONG_AS_FORWARD]


def bubble(simulation: Simulation) -> Fraction:
    """The exact bubble."""
    return Fraction(sum(simulation.idle), sum(simulation.busy))


def test_a_step_by_hand():
    #          0   1   2   3   4   5   6   7   8
    # rank 0   F0  F1          B0  B0      B1  B1
    # rank 1       F0  B0  B0  F1  B1  B1
    found = simulate(build_schedule("1f1b", 2, 2), UNIT)
    assert found.starts == [[0, 1, 4, 7], [1, 2, 4, 5]]
    assert (found.ends, found.finish) == ([9, 7], 9)
    assert (found.busy, found.idle) == ([6, 6], [3, 3])
    assert found.bubble == 6 / 12
    assert found.peak_live_activations == found.peak_memory == [2, 1]


@pytest.mark.parametrize("costs", EXACT, ids=["B=2F", "B=F"])
@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_without_chunks_is_p_minus_1_over_m(name, p, costs):
    for m in MICRO_BATCHES:
        assert bubble(simulate(build_schedule(name, p, m), costs)) == Fraction(p - 1, m)


@pytest.mark.parametrize("costs", EXACT, ids=["B=2F", "B=F"])
@pytest.mark.parametrize("p", RANKS)
def test_the_bubble_with_chunks_is_p_minus_1_over_v_m(p, costs):
    for v in (2, 3, 4):
        for m in range(p, 21):
            sizes = {g for g in (p, p + 1, m) if p <= g <= m and (m % g == 0 or m % g >= p)}
            for g in sizes:
                found = simulate(build_schedule("interleaved", p, m, v, group_size=g), costs)
                assert bubble(found) == Fraction(p - 1, v * m)
                assert found.peak_live_activations == [
                    min(2 * (p - rank - 1) + (v - 1) * g + 1, v * m) for rank in range(p)
                ]


@pytest.mark.parametrize("p", RANKS)
def test_1f1b_keeps_as_many_activations_as_there_are_ranks_behind_and_gpipe_all(p):
    for m in MICRO_BATCHES:
        assert simulate(build_schedule("gpipe", p, m), UNIT).peak_live_activations == [m] * p
        assert simulate(build_schedule("1f1b", p, m), UNIT).peak_live_activations == [min(p - i, m) for i in range(p)]


@pytest.mark.parametrize("p", RANKS)
def test_zero_bubble_is_the_papers(p):
    # arXiv:2401.10241, section 2.3: each rank is idle for (p-1)(F+I-W); rank i keeps p - i whole activations, and for i
    # more, what the backward of weights needs
    for m in range(p, 21):
        for forward, input_, weight in [(1, 1, 1), (2, 2, 1), (3, 2, 2), (2, 3, 1), (5, 7, 3)]:
            costs = Costs(forward=forward, backward_input=input_, backward_weight=weight)
            found = simulate(build_schedule("zero_bubble", p, m), costs)
            assert set(found.idle) == {(p - 1) * (forward + input_ - weight)}
        memory = Costs(activations=10, kept_for_weights=3)
        found = simulate(build_schedule("zero_bubble", p, m), memory)
        assert found.peak_live_activations == [p] * p, "as many as on the first rank of 1F1B, on every rank"
        assert found.peak_memory == [(p - i) * 10 + i * 3 for i in range(p)]


@pytest.mark.parametrize("p", range(2, 9))
def test_zero_bubble_has_a_third_of_the_bubble_of_1f1b_and_zb_v_half_of_that(p):
    for m in range(1, 21):
        bubbles = [bubble(simulate(build_schedule(name, p, m), UNIT)) for name in ("1f1b", "zero_bubble")]
        in_a_v = bubble(simulate(build_schedule("zb_v", p, m, 2), UNIT))
        assert bubbles[0] > bubbles[1] >= in_a_v
        if 2 * m >= 3 * p - 1:
            assert [bubbles[0] / 3, bubbles[0] / 6] == [bubbles[1], in_a_v]


@pytest.mark.parametrize("p", RANKS)
def test_a_rank_of_zb_v_never_waits_and_keeps_no_more_than_1f1b(p):
    # arXiv:2405.15362: no bubble if F = I = W, and activations for p micro-batches in all layers of a rank
    for m in MICRO_BATCHES:
        found = simulate(build_schedule("zb_v", p, m, 2), UNIT)
        waits = [end - starts[0] - busy for end, starts, busy in zip(found.ends, found.starts, found.busy, strict=True)]
        assert max(found.peak_live_activations) <= 2 * min(p, m)
        if m >= 2 * p - 1:
            assert waits == [0] * p
            assert found.peak_live_activations == [2 * p] * p


@pytest.mark.parametrize("p", RANKS)
def test_an_evaluation_is_as_short_as_can_be(p):
    for m in MICRO_BATCHES:
        for v in (1, 2, 3, 4):
            # the last rank waits p - 1, then works without a gap; with fewer micro-batches than ranks, it waits in each
            # round of the chunks
            rounds = v * m if m >= p else (v - 1) * p + m
            found = simulate(forward_only(Placement(p, v), m), UNIT)
            assert found.finish == p - 1 + rounds
            assert found.peak_live_activations == found.peak_memory == [0] * p, "a forward alone keeps nothing"
        # in a V, the last rank works without a gap from p - 1 on, and its last output passes p - 1 ranks on the way up
        assert simulate(forward_only(Placement(p, 2, "v"), m), UNIT).finish == 2 * m + 2 * (p - 1)


def test_each_stage_may_cost_differently():
    slow = [Costs(), Costs(forward=3, backward_input=3, backward_weight=3, activations=5)]
    found = simulate(build_schedule("1f1b", 2, 4), slow)
    assert found.busy == [12, 36]
    assert found.finish == 1 + 36 + 2, "the slow stage works without a gap between the first forward and last backward"
    assert found.peak_memory == [2, 5]
    # in a V, stages 0 and 3 are on rank 0
    four = [Costs(forward=time) for time in (1, 10, 100, 1000)]
    assert simulate(forward_only(Placement(2, 2, "v"), 1), four).busy == [1001, 110]


def test_messages_take_time_between_ranks_and_none_within():
    one_way = simulate(forward_only(Placement(3), 1), UNIT, communication=10)
    assert one_way.starts == [[0], [11], [22]]
    in_a_v = simulate(forward_only(Placement(2, 2, "v"), 1), UNIT, communication=10)
    assert in_a_v.starts == [[0, 23], [11, 12]]
    back = simulate(build_schedule("1f1b", 2, 1), UNIT, communication=10)
    assert back.starts == [[0, 24], [11, 12]]


def test_a_whole_backward_takes_both_its_parts_and_frees_all():
    plans = ((Action("forward", 0), Action("backward_input", 0), Action("backward_weight", 0, reduces=True)),)
    costs = Costs(forward=1, backward_input=2, backward_weight=4, activations=8, kept_for_weights=3)
    split = simulate(Schedule(Placement(1), 1, plans), costs)
    whole = simulate(build_schedule("1f1b", 1, 1), costs)
    assert split.starts == [[0, 1, 3]]
    assert whole.starts == [[0, 1]]
    assert split.finish == whole.finish == 7
    assert split.peak_memory == whole.peak_memory == [8]


def test_costs_of_another_number_of_stages_are_refused():
    with pytest.raises(
        ConfigError, match=r"one entry per stage \(8\); got 4; pass a single Costs if all stages cost the same"
    ):
        simulate(build_schedule("interleaved", 4, 4, 2), [UNIT] * 4)
