"""The GPU clock, on a simulated device that works in order, behind a host that takes time to launch."""

from types import SimpleNamespace

import pytest

from benchmarks.fusions import clock
from benchmarks.fusions.clock import Clock

_CYCLES_PER_SECOND = 1e9
_WRITE_BACK = 3e-5  # seconds that a dirty cache adds to the next work


class Played:
    """A host clock, and the time at which the device will have finished its queue."""

    def __init__(self) -> None:
        self.now = self.done = 0.0
        self.dirty = False

    def launch(self, host: float, device: float) -> None:
        self.now += host
        self.done = max(self.now, self.done) + device + (_WRITE_BACK if self.dirty else 0.0)

    def synchronize(self) -> None:
        self.now = max(self.now, self.done)

    def flush(self, *, dirty: bool) -> None:
        self.launch(1e-6, 6e-5)
        self.dirty = dirty

    def torch(self) -> SimpleNamespace:
        played = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = max(played.now, played.done)

            def elapsed_time(self, end: "Event") -> float:
                assert played.now >= end.at, "nobody waited for the event"
                return 1e3 * (end.at - self.at)

        cuda = SimpleNamespace(
            Event=Event,
            synchronize=self.synchronize,
            _sleep=lambda cycles: self.launch(1e-6, cycles / _CYCLES_PER_SECOND),
        )
        buffer = SimpleNamespace(amax=lambda: self.flush(dirty=False), zero_=lambda: self.flush(dirty=True))
        return SimpleNamespace(cuda=cuda, zeros=lambda *_, **__: buffer)


@pytest.fixture
def played(monkeypatch) -> Played:
    device = Played()
    monkeypatch.setattr(clock, "torch", device.torch())
    monkeypatch.setattr(clock.time, "perf_counter", lambda: device.now)
    return device


@pytest.mark.parametrize(("host", "device"), [(2e-4, 5e-6), (5e-6, 2e-3), (1e-1, 3e-1)])
def test_work_is_timed_without_the_host_that_launches_it_and_without_emptying_the_cache(host, device, played):
    assert Clock("cuda").seconds(lambda: played.launch(host, device), repeats=3) == pytest.approx(device)


def test_a_call_that_waits_for_the_device_is_timed_with_its_wait(played):
    def call() -> None:
        played.launch(1e-5, 1e-4)
        played.synchronize()
        played.launch(1e-5, 1e-4)

    assert Clock("cuda").seconds(call) == pytest.approx(2.1e-4, rel=0.01)


def test_of_several_calls_the_median_counts(played):
    seconds = iter([1e-5, 9e-5, 2e-5, 3e-5])  # the first call measures the launch time

    def work() -> None:
        played.launch(1e-6, next(seconds))

    assert Clock("cuda").seconds(work, repeats=3) == pytest.approx(3e-5)
