"""The energy of training steps: for metrics.jsonl lap by lap, and in a line at the end."""

import logging

from megalith.observe.energy_monitor import EnergyMonitor
from megalith.observe.units import energy, quantity

__all__ = ["EnergyOfSteps"]

log = logging.getLogger(__name__)


class EnergyOfSteps:
    """What ``monitor`` measures, per token. Every rank calls the methods.

    Args:
        tokens: consumed by the run before its first step of this start.
    """

    def __init__(self, monitor: EnergyMonitor, tokens: int) -> None:
        self.monitor = monitor
        self._tokens = self._first_tokens = tokens
        self._joules = self._seconds = 0.0
        self._least_counters = monitor.num_counters  # that were read in every lap

    def lap(self, tokens: int) -> dict[str, float] | None:
        """Returns the fields of metrics.jsonl for the steps since the last lap; None if no counter could be read.

        ``tokens`` is what the run has consumed by now.
        """
        lap, expected = self.monitor.lap(), self.monitor.num_counters
        if lap.num_counters < expected:
            log.warning("only %d of %d energy counters could be read", lap.num_counters, expected)
        self._joules += lap.joules
        self._seconds += lap.seconds
        self._least_counters = min(self._least_counters, lap.num_counters)
        new_tokens, self._tokens = tokens - self._tokens, tokens
        if not lap.num_counters or not lap.joules:
            return None
        return {
            "joules": lap.joules,
            "watts": lap.watts,
            "tokens_per_joule": new_tokens / lap.joules,
            "counters": lap.num_counters,
        }

    def summary(self, tokens: int) -> str:
        """Returns a line about all steps of this start."""
        self.lap(tokens)
        least, expected = self._least_counters, self.monitor.num_counters
        partly = "" if least == expected else f", read from only {least} of {expected} counters at times"
        if not self._joules:
            return f"energy of the steps   not measured{partly}"
        per_joule = (self._tokens - self._first_tokens) / self._joules
        watts = quantity(self._joules / self._seconds)
        return f"energy of the steps   {energy(self._joules)}, {quantity(per_joule)} tokens/J, {watts} W{partly}"
