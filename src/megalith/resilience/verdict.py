"""What ended a run of several ranks: one exit code and one message, out of what became of each rank.

Where one rank fails, the others fail after it, because a connection broke. The first cause is looked for: a rank that a
signal killed, then a rank with an error that was foreseen, then the first with any other error.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from megalith.resilience.rank_link import Failure
from megalith.resilience.stop_signals import REQUESTS

__all__ = ["SAVED", "SERVER_DIED", "Ended", "Verdict", "judge"]

SAVED = 75  # a run that was asked to stop, and has saved; EX_TEMPFAIL of sysexits.h
_LOST = 255  # what multiprocessing says of a process whose server has died, so that nobody knows what became of it


@dataclass(frozen=True)
class Ended:
    """What became of a rank, in the order in which they ended.

    Attributes:
        code: its exit code; below 0 the signal that killed it.
        failure: the error that it told of.
    """

    rank: int
    code: int
    failure: Failure | None = None


@dataclass(frozen=True)
class Verdict:
    """How the run ends. ``goes_on``: whether the same command would go on from the last checkpoint."""

    code: int
    message: str = ""
    goes_on: bool = False


SERVER_DIED = Verdict(1, "the process that the ranks were forked from has died (out of memory?)", goes_on=True)


def judge(ended: Sequence[Ended]) -> Verdict:
    """The verdict over the ranks that ended by themselves, first to last; there is one at least."""
    if killed := [one for one in ended if one.code < 0]:
        return Verdict(1, "; ".join(f"rank {one.rank} was killed by {_signal(-one.code)}" for one in killed), True)
    if quitting := [one.code for one in ended if one.code - 128 in REQUESTS]:
        return Verdict(quitting[0], goes_on=True)
    failures = [(one.rank, one.failure) for one in ended if one.failure is not None and not one.failure.second_hand]
    for rank, failure in failures:
        if failure.foreseen:
            return Verdict(failure.code, f"error: {'' if failure.on_every_rank else f'rank {rank}: '}{failure.text}")
    if failures:
        rank, failure = failures[0]
        return Verdict(failure.code, f"rank {rank} failed:\n{failure.text.rstrip()}", True)
    if any(one.code == _LOST for one in ended):
        return SERVER_DIED
    for one in ended:
        if one.code not in (0, SAVED):
            return Verdict(one.code, f"rank {one.rank} ended with exit code {one.code}", True)
    return Verdict(max(one.code for one in ended))


def _signal(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    hint = " (out of memory?)" if number == signal.SIGKILL else ""
    return f"{name} ({number}){hint}" if name.startswith("SIG") else f"{name}{hint}"
