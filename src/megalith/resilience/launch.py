"""Starts the ranks of a run on this machine and watches over them: what ``--nproc`` stands for.

A first signal to this process, or to any rank, is passed on to all ranks, which save at the step boundary; a second one
ends them. Ctrl-Z suspends them too. Where a rank fails, the others are ended and the first cause is told. The standard
error of all ranks, and the output of all but rank 0, goes to files.
"""

import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from megalith.errors import RankFailedError
from megalith.resilience.rank_watch import Rank, Watch, ended_with_the_block, open_log, start_rank
from megalith.resilience.stop_signals import REQUESTS, handled
from megalith.resilience.verdict import SERVER_DIED
from megalith.storage.failures import explained

__all__ = ["launch"]


def launch(
    num_ranks: int,
    arguments: Sequence[str],
    logs: Path,
    say: Callable[[str], None],
    *,
    goes_on: Callable[[], str],
    stall_seconds: float = 60.0,
) -> int:
    """Runs ``megalith ARGUMENTS`` on ``num_ranks`` ranks; returns the exit code of the run.

    ``logs`` is the folder for what ranks print (``rank-1.log``; one that is there is appended to). ``say`` is given
    lines for a person, the cause of a failure last, and after a failure that loses work what ``goes_on()`` says of the
    way on. After ``stall_seconds`` without a step it is told which rank the others wait for.

    0: every rank has ended well. 1: a rank died, or failed with an error that was not foreseen. 128 + number: quit by
    a second signal. Else the exit code of the rank that failed first.

    Raises:
        StorageError: before any rank is started; ``logs`` cannot be written.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    files = [logs / f"rank-{number}.log" for number in range(num_ranks)]
    for file in files:
        with explained("write", file):
            logs.mkdir(parents=True, exist_ok=True)
            os.close(open_log(file))
    say(f"starting {num_ranks} ranks")
    ranks: list[Rank] = []
    watch = Watch(ranks, say, stall_seconds)
    with (
        handled(REQUESTS, watch.requests.add),
        handled((signal.SIGTSTP,), watch.suspensions.append),
        tempfile.TemporaryDirectory(prefix="megalith-") as folder,
        ended_with_the_block(ranks),
    ):
        try:
            for number, file in enumerate(files):
                store = Path(folder, "store")
                ranks.append(start_rank(number, num_ranks, store, file, _run_program, tuple(arguments)))
        except RankFailedError:
            verdict = SERVER_DIED
        else:
            verdict = watch.until_the_end()
    way_on = f"{goes_on()} (what each rank printed: {logs})" if verdict.goes_on else ""
    if verdict.message or way_on:
        joint = "\n" if "\n" in verdict.message else "; "
        say(joint.join(filter(None, (verdict.message, way_on))))
    return verdict.code


def _run_program(arguments: tuple[str, ...]) -> None:
    """``python -m megalith ARGUMENTS``."""
    sys.argv = ["megalith", *arguments]
    runpy.run_module("megalith", run_name="__main__")
