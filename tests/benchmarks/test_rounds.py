"""benchmarks/rounds: which rounds count, and their statistics."""

import pytest

from benchmarks.rounds import Round, Spread, of_rate, ratios, seconds

QUIET = {"float32": 0.3, "bfloat16": 2.0, "copy": 20.0}


def a_round(after=QUIET, **spent):
    return Round(spent, QUIET, after)


@pytest.mark.parametrize(("copy", "kept"), [(20.0, True), (18.1, True), (21.9, True), (17.9, False), (22.1, False)])
def test_a_round_counts_while_no_rate_moved_by_more_than_a_tenth(copy, kept):
    assert a_round(QUIET | {"copy": copy}).kept is kept


def test_ratios_are_formed_within_a_round_before_the_median():
    # the machine slows down threefold: medians of seconds would say 1.0, each round says 2.0
    rounds = [a_round(base=2.0, ours=1.0), a_round(base=4.0, ours=2.0), a_round(base=12.0, ours=6.0)]
    assert ratios(rounds, "ours", "base") == Spread(2.0, 2.0, 2.0)


def test_the_part_of_a_rate_is_of_the_calibrations_around_each_round():
    # 6 TFLOP in 2 s, with 2.0 TFLOP/s before and 1.0 after: 3 of 1.5; in 4 s, with 2.0 before and after: 1.5 of 2
    rounds = [a_round(QUIET | {"bfloat16": 1.0}, ours=2.0), a_round(ours=4.0)]
    assert of_rate(rounds[:1], "ours", 6.0, "bfloat16") == pytest.approx(2.0)
    assert of_rate(rounds, "ours", 6.0, "bfloat16") == pytest.approx((2.0 + 0.75) / 2)
    assert of_rate(rounds, "absent", 6.0, "bfloat16") is None


def test_quartiles_are_those_of_the_textbook():
    rounds = [a_round(ours=float(n)) for n in (5, 1, 4, 2, 3)]
    assert seconds(rounds, "ours") == Spread(median=3.0, low=2.0, high=4.0)


def test_a_contender_that_dropped_out_is_judged_by_the_rounds_it_ran():
    rounds = [a_round(base=2.0, ours=1.0), a_round(base=2.0)]
    assert ratios(rounds, "ours", "base") == Spread(2.0, 2.0, 2.0)
    assert ratios(rounds, "absent", "base") is None
    assert seconds([], "ours") is None
