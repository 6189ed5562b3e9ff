"""The estimate of the time left, by hand."""

import math

from megalith.observe.time_left import TimeLeft


def test_nothing_is_known_before_the_first_step():
    assert math.isnan(TimeLeft(10).after(0))


def test_one_slow_step_does_not_count_and_old_steps_are_forgotten():
    left = TimeLeft(1000)
    for seconds in (2.0, 2.0, 90.0):
        left.add_step(seconds)
    assert left.after(3) == 997 * 2.0
    for _ in range(50):
        left.add_step(3.0)
    assert left.after(53) == 947 * 3.0


def test_what_comes_between_steps_counts_at_its_own_rate():
    left = TimeLeft(25)
    left.add_step(1.0)
    left.add("evaluation", 10, 4.0)
    left.add("evaluation", 10, 6.0)
    assert left.after(20) == 5 * 1.0 + 2 * 5.0  # at 20, which is still to come, and at the end
    assert left.after(21) == 4 * 1.0 + 1 * 5.0
    assert left.after(25) == 5.0
    left.add("checkpoint", 5, 0.5)
    assert left.after(21) == 4 * 1.0 + 5.0 + 0.5
    left.add("at the end", None, 7.0)
    assert left.after(25) == 5.0 + 0.5 + 7.0


def test_a_last_step_that_is_due_anyway_counts_once():
    left = TimeLeft(20)
    left.add_step(1.0)
    left.add("evaluation", 10, 5.0)
    assert left.after(1) == 19.0 + 10.0
