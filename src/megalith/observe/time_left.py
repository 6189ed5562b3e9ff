"""How long a run will still take: the median of its recent steps, and what happens between steps at its own rate."""

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

__all__ = ["TimeLeft"]

_RECENT = 50  # steps: enough to outvote a slow one, few enough to follow a machine that has changed its speed


@dataclass
class _Recurring:
    """An evaluation, say: how often it comes (None: at the end only), and how long it took."""

    every: int | None
    seconds: float = 0.0
    count: int = 0

    def still_due(self, step: int, last_step: int) -> int:
        """How often it comes from ``step``, not done there yet, to ``last_step``, where it always does."""
        if self.every is None:
            return 1
        return last_step // self.every - (step - 1) // self.every + (last_step % self.every != 0)


class TimeLeft:
    """An estimate for a run of ``last_step`` steps. It is given seconds of work: no waiting for a compiler."""

    def __init__(self, last_step: int) -> None:
        self._last_step = last_step
        self._steps: deque[float] = deque(maxlen=_RECENT)
        self._recurring: dict[str, _Recurring] = {}

    def add_step(self, seconds: float) -> None:
        """A step took ``seconds``."""
        self._steps.append(seconds)

    def add(self, name: str, every: int | None, seconds: float) -> None:
        """What comes after every so many steps, and after the last, took ``seconds`` this time."""
        recurring = self._recurring.setdefault(name, _Recurring(every))
        recurring.seconds += seconds
        recurring.count += 1

    def after(self, step: int) -> float:
        """Seconds left when ``step`` is done, and nothing yet of what comes after it; NaN before any step is known."""
        if not self._steps:
            return math.nan
        between = (
            each.still_due(step, self._last_step) * each.seconds / each.count for each in self._recurring.values()
        )
        return (self._last_step - step) * median(self._steps) + math.fsum(between)
