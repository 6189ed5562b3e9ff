"""Combines what happened to each rank of a run into one exit code and one message.

If one rank fails, the others fail after it, because connections break. The root cause is searched for in this order: a
rank killed by a signal, a rank with an expected error (a MegalithError), the first rank with another error that was not
raised by a collective, the first rank with any other error.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from megalith.resilience.rank_link import Failure
from megalith.resilience.stop_signals import REQUESTS

__all__ = ["SAVED", "SERVER_DIED", "Ended", "Verdict", "judge"]

SAVED = 75  # exit code of a run that was asked to stop, and has saved; EX_TEMPFAIL of sysexits.h
_LOST = 255  # multiprocessing's exit code for a process whose server has died, so that its real one is unknown


@dataclass(frozen=True)
class Ended:
    """How a rank ended.

    Attributes:
        code: its exit code; negative: the signal that killed it.
        failure: the error that it reported.
    """

    rank: int
    code: int
    failure: Failure | None = None


@dataclass(frozen=True)
class Verdict:
    """How the run ended. ``goes_on``: whether the same command would continue from the last checkpoint."""

    code: int
    message: str = ""
    goes_on: bool = False


SERVER_DIED = Verdict(1, "the process that the ranks were forked from has died (out of memory?)", goes_on=True)


def judge(ended: Sequence[Ended]) -> Verdict:
    """Returns the verdict over the ranks that ended by themselves, in the order they ended; there is at least one."""
    if killed := [one for one in ended if one.code < 0]:
        return Verdict(1, "; ".join(f"rank {one.rank} was killed by {_signal(-one.code)}" for one in killed), True)
    if quitting := [one.code for one in ended if one.code - 128 in REQUESTS]:
        return Verdict(quitting[0], goes_on=True)
    failures = [(one.rank, one.failure) for one in ended if one.failure is not None and not one.failure.second_hand]
    for rank, failure in failures:
        if failure.foreseen:
            return Verdict(failure.code, f"error: {'' if failure.on_every_rank else f'rank {rank}: '}{failure.text}")
    if failures:
        # ranks may end in another order than they failed in, and the one that failed first may still be freeing memory
        rank, failure = min(failures, key=lambda one: one[1].of_connection)
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
