"""Calls a function on several ranks of this machine, which start for it and end with it."""

import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from megalith.errors import MegalithError, RankFailedError
from megalith.resilience.rank_link import Failure, tell_failure
from megalith.resilience.rank_watch import Rank, Watch, ended_with_the_block, start_rank

__all__ = ["call_ranks"]

T = TypeVar("T")


def call_ranks(num_ranks: int, function: Callable[..., T], *arguments: Any, stall_seconds: float = 300.0) -> list[T]:
    """What ``function(*arguments)`` returns on each of ``num_ranks`` ranks, in their order.

    The function stands at the top level of a module; what it is given and returns travels by pickle. It finds the
    environment of a launcher's rank, and starts torch.distributed itself. What ranks print is dropped.

    Raises:
        RankFailedError: a rank raised or died, or none has taken a step for ``stall_seconds``: which, where and why.
            No process is left.
    """
    ranks: list[Rank] = []
    with tempfile.TemporaryDirectory(prefix="megalith-") as place, ended_with_the_block(ranks):
        folder = Path(place)
        answers = [folder / f"answer-{number}" for number in range(num_ranks)]
        for number, answer in enumerate(answers):
            log = folder / f"rank-{number}.log"
            ranks.append(start_rank(number, num_ranks, folder / "store", log, _answer, answer, function, arguments))
        verdict = Watch(ranks, _drop, stall_seconds, gives_up=True).until_the_end()
        if verdict.code:
            raise RankFailedError(verdict.message)
        return [pickle.loads(answer.read_bytes()) for answer in answers]


def _answer(path: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """A rank: writes what the function returns to ``path``, or tells what it has raised."""
    os.dup2(2, 1)  # what rank 0 prints would come in the middle of what the program does
    try:
        path.write_bytes(pickle.dumps(function(*arguments)))
    except MegalithError as error:
        second_hand = isinstance(error, RankFailedError)
        tell_failure(Failure(str(error), 2, True, error.on_every_rank, second_hand))
        sys.exit(2)
    except Exception:
        tell_failure(Failure(traceback.format_exc(), 1, foreseen=False))
        sys.exit(1)


def _drop(line: str) -> None:
    """What a watch has to say besides its verdict."""
