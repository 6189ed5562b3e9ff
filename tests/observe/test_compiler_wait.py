"""Waiting for torch.compile: announced once, counted separately, with occasional progress."""

import time

import pytest
import torch

from megalith.observe import compiler_wait
from megalith.observe import timers as timers_module
from megalith.observe.compiler_wait import CompilerWait
from megalith.observe.timers import Timers

SECONDS = 3.0  # duration of a build


@pytest.fixture
def now(monkeypatch):
    """A clock that advances only during builds."""
    clock = [100.0]
    for module in (timers_module, compiler_wait):
        monkeypatch.setattr(module, "perf_counter", lambda: clock[0])
    return clock


def built_in(clock):
    """A function that torch.compile has not built yet, whose build takes ``SECONDS``."""

    def backend(graph, _inputs):
        clock[0] += SECONDS
        return graph.forward

    return torch.compile(lambda x: x + 1, backend=backend, dynamic=False)


def test_builds_are_announced_once_counted_apart_from_open_spans_and_their_progress_is_shown(now):
    timers, lines, progress = Timers(), [], []
    function = built_in(now)
    with CompilerWait(timers, lines.append, progress.append).watched(), timers("forward"):
        for length in (2, 3, 4, 2, 3, 4):  # three shapes, each built when it is first seen
            function(torch.zeros(length))
            now[0] += 1.0
    assert timers.totals() == {"compile": 3 * SECONDS, "forward": 6.0}
    [announced] = lines
    assert "for this machine, once" in announced
    assert progress == ["compiling: 2 built in 6.0 s"]  # at 3, 7 and 11 s: none sooner than 5 s after the previous one


def test_a_long_build_is_shown_while_it_goes_on(now, monkeypatch):
    monkeypatch.setattr(compiler_wait, "_TICK", 0.001)
    progress: list[str] = []

    def backend(graph, _inputs):
        now[0] += 60.0
        deadline = time.monotonic() + 60
        while not progress:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return graph.forward

    with CompilerWait(Timers(), str, progress.append).watched():
        torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(2))
    assert progress == ["compiling: 0 built in 1 min 0 s"]


def test_nothing_is_said_or_counted_where_nothing_is_built_or_after_the_end(now):
    timers, lines = Timers(), []
    with CompilerWait(timers, lines.append, lines.append).watched():
        pass
    built_in(now)(torch.zeros(2))
    assert (lines, timers.totals()) == ([], {})


def test_a_build_that_fails_is_counted_and_the_span_around_it_goes_on(now):
    timers = Timers()

    def backend(graph, _inputs):
        now[0] += SECONDS
        raise RuntimeError("no compiler")

    with CompilerWait(timers, str, str).watched(), timers("forward"):
        with pytest.raises(RuntimeError, match="no compiler"):
            torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(2))
        now[0] += 1.0
    assert timers.totals() == {"compile": SECONDS, "forward": 1.0}
