"""stop_request: real signals to this process, its time limit, and restored handlers."""

import os
import signal
import time
from threading import Thread

import pytest

from megalith.resilience.stop_request import StopRequest

NUMBERS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]


def request() -> StopRequest:
    return StopRequest(str)  # accepts a line and drops it


@pytest.fixture(autouse=True)
def own_handlers():
    """Fails if a test leaves handlers behind, which would stop the test run at the next signal."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    after = {number: signal.getsignal(number) for number in NUMBERS}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == before


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_sets_the_reason_and_the_process_lives_on(number):
    with request() as stop:
        assert stop.reason is None
        os.kill(os.getpid(), number)
        assert stop.reason == number.name
    assert stop.reason == number.name, "the reason outlives the block"


def test_the_handlers_of_before_are_back_afterwards():
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        with request():
            os.kill(os.getpid(), signal.SIGTERM)
            assert received == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_handlers_are_back_after_an_error_which_passes():
    before = [signal.getsignal(number) for number in NUMBERS]
    with pytest.raises(RuntimeError, match="a step failed"), request():
        raise RuntimeError("a step failed")
    assert [signal.getsignal(number) for number in NUMBERS] == before


def test_blocks_nest_and_the_inner_one_hears():
    with request() as outer:
        with request() as inner:
            os.kill(os.getpid(), signal.SIGUSR1)
        assert (outer.reason, inner.reason) == (None, "SIGUSR1")
        os.kill(os.getpid(), signal.SIGTERM)
        assert outer.reason == "SIGTERM"


def test_the_time_limit_is_in_minutes_from_construction(monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[-1])
    stop = request()
    stop.limit_time(2.5)
    reasons = []
    for moment in (1000.0, 1149.9, 1150.0, 1e6):
        clock.append(moment)
        reasons.append(stop.reason)
    assert reasons == [None, None, "the time limit", "the time limit"]


def test_without_a_limit_time_never_ends(monkeypatch):
    stop = request()
    stop.limit_time(None)
    monkeypatch.setattr(time, "monotonic", lambda: 1e12)
    assert stop.reason is None


def test_a_signal_is_told_before_the_limit():
    with request() as stop:
        stop.limit_time(0.0)
        assert stop.reason == "the time limit"
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.reason == "SIGTERM"


def test_a_signal_that_was_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with request() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.reason is None
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.reason == "SIGTERM"
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_one_request_that_arrives_as_several_signals_is_announced_once():
    told: list[str] = []
    with StopRequest(told.append) as stop:
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
            os.kill(os.getpid(), number)
    assert told == ["SIGINT: saving at the next step boundary; signal again to quit now"]
    assert stop.reason == "SIGINT"


def test_what_a_supervisor_forwards_is_not_announced_and_not_counted():
    told: list[str] = []
    with StopRequest(told.append) as stop:
        os.kill(os.getpid(), signal.SIGUSR2)
        assert stop.reason == "SIGUSR2"
    assert told == []


def test_in_another_thread_nothing_is_heard_and_nothing_fails():
    reasons = []

    def work() -> None:
        with request() as stop:
            reasons.append(stop.reason)

    thread = Thread(target=work)
    thread.start()
    thread.join()
    assert reasons == [None]
