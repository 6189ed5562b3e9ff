"""Timers: spans nest, add up, survive errors, never wait for a device, and have little overhead."""

import sys

import pytest

from megalith.observe import timers as timers_module
from megalith.observe.timers import Timers


@pytest.fixture
def clock(monkeypatch):
    """A clock that only tests advance."""
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


def test_an_interruption_stands_at_the_top_and_is_no_part_of_the_spans_that_it_interrupts(clock):
    timers = Timers()
    for _ in range(2):
        with timers("forward"):
            clock(1)
            with timers("layer"):
                clock(2)
                with timers.interrupt("compile"):
                    clock(30)
                with timers("mlp"):
                    clock(4)
    assert timers.totals() == {"forward": 14, "forward/layer": 12, "forward/layer/mlp": 8, "compile": 60}


def test_an_interruption_of_a_late_device_is_taken_away_when_the_device_has_passed_it():
    device = LateDevice()
    timers = Timers(device)
    with timers("a"), timers.interrupt("compile"):  # marks 1 2, 3 4
        pass
    device.passed = 4
    assert timers.totals() == {"a": 2.0, "compile": 1.0}  # by hand: 4 - 1 seconds, of which 3 - 2 were compiling


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


class LateDevice:
    """A clock whose marks are queued; the device passes them one second apart, when a test says so."""

    def __init__(self):
        self.marked = 0
        self.passed = 0

    def mark(self):
        self.marked += 1
        return self.marked

    def seconds(self, start, end):
        return float(end - start) if end <= self.passed else None


def test_a_span_is_counted_once_the_device_has_passed_its_second_mark_and_nobody_waits():
    device = LateDevice()
    timers = Timers(device)
    with timers("a"), timers("b"):  # marks 1 2, 3 4
        pass
    assert device.passed == 0, "nobody waited for it"
    assert timers.totals() == {"a": 0.0, "a/b": 0.0}
    device.passed = 3
    assert timers.totals() == {"a": 0.0, "a/b": 1.0}
    device.passed = 4
    assert timers.totals() == {"a": 3.0, "a/b": 1.0}
    assert timers.totals() == {"a": 3.0, "a/b": 1.0}, "once, and not again"


def test_spans_that_were_late_add_up_with_those_that_follow():
    device = LateDevice()
    timers = Timers(device)
    for _ in range(3):
        with timers("a"):
            pass
    device.passed = 5  # of 6
    assert timers.totals() == {"a": 2.0}
    with timers("a"):
        pass
    device.passed = 8
    assert timers.totals() == {"a": 4.0}


def test_an_error_ends_a_span_of_a_late_device_too():
    device = LateDevice()
    timers = Timers(device)
    with pytest.raises(KeyError), timers("a"):
        raise KeyError
    device.passed = 2
    assert timers.totals() == {"a": 1.0}


def test_a_name_that_would_look_like_a_path_is_refused():
    with pytest.raises(AssertionError, match="a span cannot be named 'a/b'"):
        Timers()("a/b")


def calls_of(function):
    """Names of the functions that ``function`` calls, in Python or C."""
    names = []

    def note(frame, event, argument):
        if event == "call":
            names.append(frame.f_code.co_name)
        elif event == "c_call":
            names.append(argument.__name__)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return [name for name in names if name not in ("setprofile", function.__name__)]


def test_an_entry_takes_two_marks_and_finds_its_span():
    device = LateDevice()
    timers = Timers(device)

    def enter():
        with timers("a"):
            pass

    enter()
    assert device.marked == 2
    span = timers("a")
    # a look-up, two marks, one stored pair: nothing that grows with the number of spans or entries
    want = ["__call__", "get", "__enter__", "mark", "__exit__", "mark", "append"]
    assert calls_of(enter) == want
    for _ in range(100):
        with timers("b"), timers("c"):
            pass
    assert calls_of(enter) == want
    assert timers("a") is span, "a span is made once"
