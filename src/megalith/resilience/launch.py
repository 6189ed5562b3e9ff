"""Starts the ranks of a run on this machine and supervises them; implements ``--nproc``.

A first signal to this process, or to any rank, is forwarded to all ranks, which save at the step boundary; a second one
ends them. Ctrl-Z suspends them too. If a rank fails, the others are ended and the root cause is reported. The standard
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
from megalith.observe.machine import num_cores
from megalith.resilience.rank_watch import Rank, Watch, ended_with_the_block, open_log, start_rank, start_server
from megalith.resilience.stop_signals import REQUESTS, handled
from megalith.resilience.verdict import SERVER_DIED
from megalith.storage.failures import explained

__all__ = ["get_ready", "launch"]


def get_ready(num_ranks: int) -> None:
    """Begins to import torch for ``launch``, in another process, while the caller checks the run.

    The ranks share this machine's cores unless OMP_NUM_THREADS is set. On macOS each rank imports torch itself, later.
    """
    # first, because torch reads it when it is imported
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // num_ranks)))
    start_server()


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

    ``logs`` is the folder for the ranks' output (``rank-1.log``; existing files are appended to). ``say`` is called
    with lines for the user: last the cause of a failure and, after a failure that loses work, the text of ``goes_on()``
    on how to continue. After ``stall_seconds`` without a step it reports which rank the others wait for.

    Exit codes: 0 if every rank ended well, 75 if the run was asked to stop and has saved; 1 if a rank died or failed
    with an unexpected error; 128 + signal number after a second signal; otherwise that of the rank that failed first.

    Raises:
        StorageError: before any rank is started; ``logs`` cannot be written.
    """
    get_ready(num_ranks)
    files = [logs / f"rank-{number}.log" for number in range(num_ranks)]
    for file in files:
        with explained("write", file):
            logs.mkdir(parents=True, exist_ok=True)
            os.close(open_log(file))
    say(f"starting {num_ranks} rank{'s' if num_ranks > 1 else ''}")
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
    way_on = f"{goes_on()} (output of each rank: {logs})" if verdict.goes_on else ""
    if verdict.message or way_on:
        joint = "\n" if "\n" in verdict.message else "; "
        say(joint.join(filter(None, (verdict.message, way_on))))
    return verdict.code


def _run_program(arguments: tuple[str, ...]) -> None:
    """Runs ``python -m megalith ARGUMENTS`` in this process."""
    sys.argv = ["megalith", *arguments]
    runpy.run_module("megalith", run_name="__main__")
