"""The energy of training steps: for metrics.jsonl lap by lap, and in a line at the end."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from megalith.observe.energy_monitor import EnergyMonitor
from megalith.observe.units import energy, quantity
from megalith.topology.agreement import rank

__all__ = ["EnergyOfSteps"]

log = logging.getLogger(__name__)


class EnergyOfSteps:
    """What ``monitor`` measures, per token. Every rank calls the methods.

    Args:
        tokens: consumed by the run before its first step of this start.
    """

    def __init__(self, monitor: EnergyMonitor, tokens: int) -> None:
        self._monitor = monitor
        self._last_tokens = tokens
        self._num_counters = monitor.num_counters  # in the last lap
        self._since: tuple[int, float] = 0, 0.0  # tokens and seconds of the steps since the last record
        # of the laps in which all counters were read
        self._joules = self._seconds = 0.0
        self._tokens = 0
        self._num_left_out = 0

    def start(self) -> None:
        """Measures from here on."""
        self._monitor.resume()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out what is used inside the block."""
        with self._monitor.paused():
            yield

    def lap(self, tokens: int) -> dict[str, float] | None:
        """Ends a lap; returns the fields of metrics.jsonl for the steps since the last ones.

        None if there were none, or if all counters were read and none has advanced; the next fields then have these
        steps too.

        Args:
            tokens: what the run has consumed by now.
        """
        lap, expected = self._monitor.lap(), self._monitor.num_counters
        new_tokens, self._last_tokens = tokens - self._last_tokens, tokens
        if not new_tokens:
            return None
        if lap.num_counters != self._num_counters and rank() == 0:
            log.warning("%d of %d energy counters can be read", lap.num_counters, expected)
        self._num_counters = lap.num_counters
        new_tokens, seconds = self._since[0] + new_tokens, self._since[1] + lap.seconds
        if lap.num_counters == expected and not lap.joules:
            self._since = new_tokens, seconds
            return None
        self._since = 0, 0.0
        found = {"tokens": new_tokens, "joules": lap.joules, "counters": lap.num_counters}
        if lap.num_counters < expected:
            self._num_left_out += 1
            return found | {"missing_counters": expected - lap.num_counters}
        self._joules += lap.joules
        self._seconds += seconds
        self._tokens += new_tokens
        return found | {"watts": lap.joules / seconds, "tokens_per_joule": new_tokens / lap.joules}

    def summary(self) -> str:
        """Returns a line about the laps of this start."""
        missing = f", without the steps of {self._num_left_out} records, in which a counter could not be read"
        partly = missing if self._num_left_out else ""
        if not self._joules:
            return f"energy of the steps   not measured{partly or ': the counters have not advanced'}"
        per_joule = quantity(self._tokens / self._joules)
        watts = quantity(self._joules / self._seconds)
        return f"energy of the steps   {energy(self._joules)}, {per_joule} tokens/J, {watts} W{partly}"
