"""stop_request: real signals to this process, the end of its time, and handlers that are given back."""

import os
import signal
import time

import pytest

from megalith.resilience.stop_request import StopRequest

NUMBERS = [signal.SIGTERM, signal.SIGUSR1]


@pytest.fixture(autouse=True)
def own_handlers():
    """Whatever a test leaves behind would stop the test run at the next signal."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    after = {number: signal.getsignal(number) for number in NUMBERS}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == before


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_sets_the_reason_and_the_process_lives_on(number):
    with StopRequest(None) as request:
        assert request.reason is None
        os.kill(os.getpid(), number)
        assert request.reason == number.name
    assert request.reason == number.name, "the reason outlives the block"


def test_the_handlers_of_before_are_back_afterwards():
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        with StopRequest(None):
            os.kill(os.getpid(), signal.SIGTERM)
            assert received == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_handlers_are_back_after_an_error_which_passes():
    before = [signal.getsignal(number) for number in NUMBERS]
    with pytest.raises(RuntimeError, match="a step failed"), StopRequest(None):
        raise RuntimeError("a step failed")
    assert [signal.getsignal(number) for number in NUMBERS] == before


def test_blocks_nest_and_the_inner_one_hears():
    with StopRequest(None) as outer:
        with StopRequest(None) as inner:
            os.kill(os.getpid(), signal.SIGUSR1)
        assert (outer.reason, inner.reason) == (None, "SIGUSR1")
        os.kill(os.getpid(), signal.SIGTERM)
        assert outer.reason == "SIGTERM"


def test_the_time_limit_is_in_minutes_from_construction(monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[-1])
    request = StopRequest(2.5)
    reasons = []
    for moment in (1000.0, 1149.9, 1150.0, 1e6):
        clock.append(moment)
        reasons.append(request.reason)
    assert reasons == [None, None, "the time limit", "the time limit"]


def test_without_a_limit_time_never_ends(monkeypatch):
    request = StopRequest(None)
    monkeypatch.setattr(time, "monotonic", lambda: 1e12)
    assert request.reason is None


def test_a_signal_is_told_before_the_limit():
    with StopRequest(0.0) as request:
        assert request.reason == "the time limit"
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.reason == "SIGTERM"
