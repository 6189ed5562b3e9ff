"""Estimates the time left of a run from the median of recent steps and the recurring work between steps."""

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

__all__ = ["TimeLeft"]

_RECENT = 50  # steps: enough to ignore outliers, few enough to follow a change in speed


@dataclass
class _Recurring:
    """Recurring work, such as evaluation: its interval in steps (None: only at the end), and how long it took."""

    every: int | None
    seconds: float = 0.0
    count: int = 0

    def still_due(self, step: int, last_step: int) -> int:
        """How many times it is due from ``step`` (not yet done there) to ``last_step``, where it always is."""
        if self.every is None:
            return 1
        return last_step // self.every - (step - 1) // self.every + (last_step % self.every != 0)


class TimeLeft:
    """The time left of a run of ``last_step`` steps. The times that are added must not include compile time."""

    def __init__(self, last_step: int) -> None:
        self._last_step = last_step
        self._steps: deque[float] = deque(maxlen=_RECENT)
        self._recurring: dict[str, _Recurring] = {}

    def add_step(self, seconds: float) -> None:
        """Adds the time of a step."""
        self._steps.append(seconds)

    def add(self, name: str, every: int | None, seconds: float) -> None:
        """Adds the time of work that recurs after ``every`` steps, and after the last step."""
        recurring = self._recurring.setdefault(name, _Recurring(every))
        recurring.seconds += seconds
        recurring.count += 1

    def after(self, step: int) -> float:
        """Seconds left after ``step``, before the recurring work that follows it; NaN before any step was added."""
        if not self._steps:
            return math.nan
        between = (
            each.still_due(step, self._last_step) * each.seconds / each.count for each in self._recurring.values()
        )
        return (self._last_step - step) * median(self._steps) + math.fsum(between)
