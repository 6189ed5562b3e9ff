"""Timers: spans nest, add up, survive errors, and cost next to nothing."""

import pytest

from megalith.observe import timers as timers_module
from megalith.observe.timers import Timers
from tests.effort import effort


@pytest.fixture
def clock(monkeypatch):
    """Time that stands still unless a test moves it."""
    now = [0.0]
    monkeypatch.setattr(timers_module, "perf_counter", lambda: now[0])

    def advance(seconds):
        now[0] += seconds

    return advance


def test_seconds_add_up_by_path_and_contain_those_of_spans_within(clock):
    timers = Timers()
    for _ in range(2):
        with timers("optimizer"):
            clock(1)
            with timers("clip"):
                clock(2)
        with timers("clip"):
            clock(4)
    assert timers.totals() == {"optimizer": 6, "optimizer/clip": 4, "clip": 8}


def test_a_span_inside_itself_is_another(clock):
    timers = Timers()
    with timers("a"), timers("a"):
        clock(1)
    assert timers.totals() == {"a": 1, "a/a": 1}


def test_an_error_ends_the_span_and_passes(clock):
    timers = Timers()

    def fail():
        clock(1)
        raise KeyError

    with pytest.raises(KeyError), timers("a"), timers("b"):
        fail()
    with timers("c"):
        pass
    assert timers.totals() == {"a": 1, "a/b": 1, "c": 0}


def test_a_reset_begins_at_zero_and_keeps_the_start_of_an_open_span(clock):
    timers = Timers()
    with timers("a"):
        clock(1)
    with timers("b"):
        clock(2)
        timers.reset()
        assert timers.totals() == {}
        clock(3)
    assert timers.totals() == {"b": 5}


def test_the_device_is_waited_for_at_both_ends_but_not_after_an_error(clock):
    timers = Timers(synchronize=lambda: clock(10))
    with timers("a"):
        clock(1)
    assert timers.totals() == {"a": 11}  # the work that was under way before is not in it
    with pytest.raises(KeyError), timers("b"):
        raise KeyError
    assert timers.totals()["b"] == 0


def test_a_name_that_would_look_like_a_path_is_refused():
    with pytest.raises(AssertionError, match="'a/b' cannot be one name"):
        Timers()("a/b")


def test_an_entry_costs_a_few_lines_and_no_new_object():
    timers = Timers()

    def enter():
        with timers("a"):
            pass

    enter()
    assert timers("a") is timers("a")
    cost = effort(enter)
    assert cost.lines < 25  # 18
    assert cost.peak_bytes < 5000  # a few frames, gone again
