"""Interleaved rounds, and statistics over them.

A round runs every contender once. The machine is calibrated before and after it, and a round in which a rate changed by
more than a tenth is discarded: it would measure other users of a shared machine. Ratios are computed within a round,
between runs that are seconds apart, and only then is the median taken.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["MOVED", "Round", "Spread", "of_rate", "ratios", "seconds"]

MOVED = 0.10

Rates = Mapping[str, float]


@dataclass(frozen=True)
class Round:
    """Seconds of each contender, and the calibrations before and after."""

    seconds: Mapping[str, float]
    before: Rates
    after: Rates

    @property
    def moved(self) -> float:
        """The largest relative change of a rate during the round."""
        return max(abs(self.after[name] / rate - 1) for name, rate in self.before.items())

    @property
    def kept(self) -> bool:
        return self.moved <= MOVED


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of at least one value; if there is only one, all three equal it."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


def seconds(rounds: Sequence[Round], name: str) -> Spread | None:
    """Over the rounds in which ``name`` ran; None if there are none."""
    values = [one.seconds[name] for one in rounds if name in one.seconds]
    return Spread.of(values) if values else None


def ratios(rounds: Sequence[Round], name: str, base: str) -> Spread | None:
    """The speed-up of ``name`` over ``base`` over the rounds in which both ran; None if there are none."""
    values = [one.seconds[base] / one.seconds[name] for one in rounds if {name, base} <= one.seconds.keys()]
    return Spread.of(values) if values else None


def of_rate(rounds: Sequence[Round], name: str, work: float, rate: str) -> float | None:
    """Median fraction of the machine's ``rate`` that ``name`` reached; ``work`` per run is in the unit of the rate.

    The rate of a round is the mean of the calibrations around it. None if ``name`` ran in no round.
    """
    parts = [
        work / one.seconds[name] / statistics.fmean((one.before[rate], one.after[rate]))
        for one in rounds
        if name in one.seconds
    ]
    return statistics.median(parts) if parts else None
