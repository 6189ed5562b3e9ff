"""The energy that the devices of a run use, summed over all ranks."""

import socket
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
        joules: used, as far as it was measured.
        seconds: measured, on this rank.
        num_counters: that were read throughout; a counter that failed at times adds what it measured otherwise.
    """

    joules: float
    seconds: float
    num_counters: int

    @property
    def watts(self) -> float:
        """The mean power."""
        return self.joules / self.seconds


class EnergyMonitor:
    """Measures the energy between ``resume`` and ``pause``. Every rank constructs one, which begins paused.

    A counter that several ranks share, such as that of a machine's CPUs, is counted once.

    Args:
        source: this rank's counter.
        device: of tensors in collectives.

    Attributes:
        num_counters: of all ranks together.
    """

    def __init__(self, source: EnergySource, device: torch.device) -> None:
        self._source, self._device = source, device
        names = all_gather(f"{socket.gethostname()} {source.name}")
        self._speaks = names.index(names[rank()]) == rank()
        self.num_counters = len(set(names))
        self._is_running = False
        self._reset()

    def resume(self) -> None:
        """Starts to measure, unless it already does."""
        if not self._is_running:
            self._is_running = True
            self._start = time.perf_counter(), self._source.joules()

    def pause(self) -> None:
        """Stops measuring until ``resume``."""
        if not self._is_running:
            return
        self._is_running = False
        (started, before), after = self._start, self._source.joules()
        self._seconds += time.perf_counter() - started
        if before is None or after is None or after < before:  # the last when a driver has been loaded again
            self._was_read = False
        else:
            self._joules += after - before

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
        with self.paused():
            return self._lap()

    def _lap(self) -> Energy:
        sums = torch.tensor([self._joules, float(self._was_read)], dtype=torch.float64, device=self._device)
        sums *= self._speaks
        if dist.is_initialized():
            dist.all_reduce(sums)
        joules, num_counters = sums.tolist()
        seconds = self._seconds
        self._reset()
        return Energy(joules, seconds, round(num_counters))

    def _reset(self) -> None:
        self._joules = self._seconds = 0.0
        self._was_read = True
