"""Calls a function on several ranks of this machine, which are started for the call and end with it."""

import faulthandler
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from megalith.errors import MegalithError, RankFailedError
from megalith.resilience.rank_link import Failure, tell_failure
from megalith.resilience.rank_watch import Rank, Watch, ended_with_the_block, start_rank
from megalith.resilience.verdict import Ended

__all__ = ["call_ranks"]

T = TypeVar("T")

_NUM_LAST_LINES = 40  # of a rank's output: enough for a Python traceback or the frames of a C++ error


def call_ranks(num_ranks: int, function: Callable[..., T], *arguments: Any, stall_seconds: float = 300.0) -> list[T]:
    """Returns what ``function(*arguments)`` returns on each of ``num_ranks`` ranks, in rank order.

    The function must be at the top level of a module; its arguments and result are pickled. It finds the environment
    variables of a launched rank, and initializes torch.distributed itself. Output of the ranks is dropped, unless they
    die.

    Raises:
        RankFailedError: a rank raised or died, or none has taken a step for ``stall_seconds``. The message says which,
            where and why, with the last output of a rank that died. No process is left.
    """
    ranks: list[Rank] = []
    with tempfile.TemporaryDirectory(prefix="megalith-") as place, ended_with_the_block(ranks):
        folder = Path(place)
        answers = [folder / f"answer-{number}" for number in range(num_ranks)]
        logs = [folder / f"rank-{number}.log" for number in range(num_ranks)]
        for number, (log, answer) in enumerate(zip(logs, answers, strict=True)):
            ranks.append(start_rank(number, num_ranks, folder / "store", log, _answer, answer, function, arguments))
        watch = Watch(ranks, _drop, stall_seconds, gives_up=True)
        verdict = watch.until_the_end()
        if verdict.code:
            raise RankFailedError("\n".join([verdict.message, *_last_words(watch.ended, logs)]))
        return [pickle.loads(answer.read_bytes()) for answer in answers]


def _answer(path: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Runs on a rank: writes the function's result to ``path``, or reports what it raised."""
    os.dup2(2, 1)  # else rank 0's output would mix with the program's
    faulthandler.enable(2)  # a fatal signal leaves a stack in the log
    try:
        path.write_bytes(pickle.dumps(function(*arguments)))
    except MegalithError as error:
        tell_failure(Failure.foreseen_error(error, 2))
        sys.exit(2)
    except Exception as error:
        tell_failure(Failure.unforeseen_error(error))
        sys.exit(1)


def _last_words(ended: Sequence[Ended], logs: Sequence[Path]) -> Iterator[str]:
    """Yields the last output of ranks that ended without reporting why."""
    for one in ended:
        log = logs[one.rank]
        # a rank that dies while starting has no log
        if one.code and one.failure is None and log.exists():
            printed = log.read_text(errors="replace").splitlines()[-_NUM_LAST_LINES:]
            yield from ([f"last output of rank {one.rank}:", *printed] if printed else [])


def _drop(line: str) -> None:
    """Ignores what a watch reports besides its verdict."""
