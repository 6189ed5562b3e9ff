"""The energy that the devices of a run use, summed over all ranks."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megalith.observe.energy_sources import EnergySource
from megalith.topology.agreement import all_gather, rank

__all__ = ["Energy", "EnergyMonitor"]


@dataclass(frozen=True)
class Energy:
    """What the counters of all ranks measured together.

    Attributes:
        joules: the energy used, as far as it was measured.
        seconds: the time measured, on this rank.
        num_counters: how many counters could be read throughout; another adds what it measured at other times.
    """

    joules: float
    seconds: float
    num_counters: int

    @property
    def watts(self) -> float:
        """The mean power; NaN of no time."""
        return self.joules / self.seconds if self.seconds else math.nan


class EnergyMonitor:
    """Measures the energy between ``resume`` and ``pause``. Every rank constructs one, which begins paused.

    A counter that several ranks share, such as that of a machine's CPUs, is counted once. Before a counter is read, the
    device finishes what has been launched.

    Args:
        source: this rank's counter.
        device: what is measured, and where tensors in collectives are.

    Attributes:
        num_counters: of all ranks together.
    """

    def __init__(self, source: EnergySource, device: torch.device) -> None:
        self._source, self._device = source, device
        names = all_gather(source.name)
        self._speaks = names.index(names[rank()]) == rank()
        self.num_counters = len(set(names))
        self._is_running = False
        self._reset()

    def resume(self) -> None:
        """Starts to measure, unless it already does."""
        if not self._is_running:
            self._is_running = True
            self._start = self._read()

    def pause(self) -> None:
        """Stops measuring until ``resume``."""
        if not self._is_running:
            return
        self._is_running = False
        self._add(self._read())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out what is used inside the block."""
        was_running = self._is_running
        self.pause()
        yield
        if was_running:
            self.resume()

    def lap(self) -> Energy:
        """Returns the energy measured since the last lap. Every rank calls it."""
        if self._is_running:
            now = self._read()  # the end of this lap, and the start of the next
            self._add(now)
            self._start = now
        sums = torch.tensor([self._joules, float(self._was_read)], dtype=torch.float64, device=self._device)
        sums *= self._speaks
        if dist.is_initialized():
            dist.all_reduce(sums)
        joules, num_counters = sums.tolist()
        seconds = self._seconds
        self._reset()
        return Energy(joules, seconds, round(num_counters))

    def _read(self) -> tuple[float, float | None]:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter(), self._source.joules()

    def _add(self, end: tuple[float, float | None]) -> None:
        (started, before), (ended, after) = self._start, end
        self._seconds += ended - started
        if before is None or after is None or after < before:  # the last when a driver has been loaded again
            self._was_read = False
        else:
            self._joules += after - before

    def _reset(self) -> None:
        self._joules = self._seconds = 0.0
        self._was_read = True
