"""Calls a function on several ranks of this machine, which start for it and end with it."""

import faulthandler
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from megalith.errors import MegalithError, RankFailedError
from megalith.resilience.rank_link import Failure, tell_failure
from megalith.resilience.rank_watch import Rank, Watch, ended_with_the_block, start_rank
from megalith.resilience.verdict import Ended

__all__ = ["call_ranks"]

T = TypeVar("T")

_NUM_LAST_LINES = 40  # of what a rank has printed: a stack in Python, or the frames of a C++ error


def call_ranks(num_ranks: int, function: Callable[..., T], *arguments: Any, stall_seconds: float = 300.0) -> list[T]:
    """What ``function(*arguments)`` returns on each of ``num_ranks`` ranks, in their order.

    The function stands at the top level of a module; what it is given and returns travels by pickle. It finds the
    environment of a launcher's rank, and starts torch.distributed itself. What ranks print is dropped, unless they die.

    Raises:
        RankFailedError: a rank raised or died, or none has taken a step for ``stall_seconds``: which, where and why,
            and what a rank that died has printed last. No process is left.
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
    """A rank: writes what the function returns to ``path``, or tells what it has raised."""
    os.dup2(2, 1)  # what rank 0 prints would come in the middle of what the program does
    faulthandler.enable(2)  # a fatal signal leaves a stack in the log
    try:
        path.write_bytes(pickle.dumps(function(*arguments)))
    except MegalithError as error:
        second_hand = isinstance(error, RankFailedError)
        tell_failure(Failure(str(error), 2, True, error.on_every_rank, second_hand))
        sys.exit(2)
    except Exception:
        tell_failure(Failure(traceback.format_exc(), 1, foreseen=False))
        sys.exit(1)


def _last_words(ended: Sequence[Ended], logs: Sequence[Path]) -> Iterator[str]:
    """What ranks that ended without a word about why have printed last."""
    for one in ended:
        if one.code and one.failure is None and (printed := logs[one.rank].read_text(errors="replace").splitlines()):
            yield "\n".join([f"rank {one.rank} printed last:", *printed[-_NUM_LAST_LINES:]])


def _drop(line: str) -> None:
    """What a watch has to say besides its verdict."""
