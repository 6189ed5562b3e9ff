"""Energy: laps and pauses by hand, counters shared by ranks or lost, and the counter of a real GPU."""

import math
import time
from collections.abc import Sequence
from itertools import repeat

import pytest
import torch

from megalith.observe.energy_monitor import Energy, EnergyMonitor
from megalith.observe.energy_sources import energy_source
from tests.rank_pool import ranks

CPU = torch.device("cpu")


class Readings:
    """A counter that has the given readings, one after another."""

    def __init__(self, joules: Sequence[float | None], name: str = "fake") -> None:
        self.name = name
        self._readings = iter(joules)

    def joules(self) -> float | None:
        return next(self._readings)

    def close(self) -> None:
        pass


def test_a_lap_has_what_was_used_between_resume_and_pause():
    monitor = EnergyMonitor(Readings([0.0, 1.0, 2.0, 4.0]), CPU)
    for _ in range(2):
        monitor.resume()
        time.sleep(0.01)
        monitor.pause()
        time.sleep(0.5)  # not counted
    lap = monitor.lap()
    assert (lap.joules, lap.num_counters) == (3.0, 1)
    assert 0.02 <= lap.seconds < 0.5
    assert lap.watts == 3.0 / lap.seconds
    empty = monitor.lap()  # still paused
    assert empty == Energy(0.0, 0.0, 1)
    assert math.isnan(empty.watts)


def test_laps_of_a_running_monitor_add_up_to_all_that_was_used_and_pauses_are_left_out():
    monitor = EnergyMonitor(Readings([100.0, 101.5, 104.0, 109.0, 110.0]), CPU)
    monitor.resume()
    monitor.resume()  # it already runs, and nothing is read
    assert monitor.lap().joules == 1.5  # the reading that ends a lap begins the next
    with monitor.paused():  # 101.5 to 104 is measured; then 5 J are not
        monitor.pause()
    assert monitor.lap().joules == 2.5 + 1.0


@pytest.mark.parametrize(
    "readings",
    [(5.0, 1.0), (None, 1.0), (5.0, None)],
    ids=["a reset counter", "unreadable at the start", "unreadable at the end"],
)
def test_an_interval_that_was_not_measured_counts_nothing_and_its_lap_says_so(readings):
    monitor = EnergyMonitor(Readings([*readings, 10.0, 12.0, 12.0, 15.0]), CPU)
    laps = []
    for num_intervals in (2, 1):  # the first of three is not measured
        for _ in range(num_intervals):
            monitor.resume()
            monitor.pause()
        laps.append(monitor.lap())
    assert [(lap.joules, lap.num_counters) for lap in laps] == [(2.0, 0), (3.0, 1)]


def lap_on_two_ranks(of_ranks: Sequence[tuple[str, Sequence[float | None]]]) -> tuple[float, int, int]:
    name, readings = of_ranks[torch.distributed.get_rank()]
    monitor = EnergyMonitor(Readings(readings, name), CPU)
    monitor.resume()
    lap = monitor.lap()
    monitor.pause()
    return lap.joules, lap.num_counters, monitor.num_counters


def test_ranks_add_up():
    of_ranks = [("GPU-0", [0.0, 3.0, 3.0]), ("GPU-1", [7.0, 9.0, 9.0])]
    assert ranks(2, lap_on_two_ranks, of_ranks) == [(5.0, 2, 2)] * 2


def test_a_counter_that_two_ranks_share_is_counted_once():
    of_ranks = [("GPU-0", [0.0, 3.0, 3.0]), ("GPU-0", [0.0, 3.5, 3.5])]
    assert ranks(2, lap_on_two_ranks, of_ranks) == [(3.0, 1, 1)] * 2


def test_a_rank_whose_counter_cannot_be_read_leaves_the_others_sum():
    of_ranks = [("GPU-0", list(repeat(None, 4))), ("GPU-1", [7.0, 9.0, 9.0, 9.0])]
    assert ranks(2, lap_on_two_ranks, of_ranks) == [(2.0, 1, 2)] * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_counter_of_a_gpu_agrees_with_its_power_over_five_seconds():
    pynvml = pytest.importorskip("pynvml")
    device = torch.device("cuda", 0)
    source, x = energy_source(device), torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    handle = pynvml.nvmlDeviceGetHandleByUUID(source.name)

    def run_for(seconds: float) -> list[float]:
        """Multiplies for some time, and returns the power in W, as sampled."""
        watts, end = [], time.perf_counter() + seconds
        while time.perf_counter() < end:
            torch.mm(x, x)
            torch.cuda.synchronize()
            watts.append(pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3)
        return watts

    run_for(2.0)  # until the power, an average over up to a second, has settled
    monitor = EnergyMonitor(source, device)
    monitor.resume()
    watts = run_for(5.0)
    lap = monitor.lap()
    assert lap.joules == pytest.approx(sum(watts) / len(watts) * lap.seconds, rel=0.1)
