"""Pauses a program at a chosen place: the nth call of a function reports that it waits until the test continues it."""

import functools
import importlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

# place -> the function that is called there, by a rank unless the place says otherwise
PLACES = {
    "before there are ranks": "megalith.training.preflight:preflight",
    "starting the server of the ranks": "multiprocessing.forkserver:main",
    "building": "megalith.training.pretrain:build_run",
    "reading data": "megalith.training.loop:local_counts",
    "in a step": "megalith.training.loop:train_step",
    "evaluating": "megalith.training.callbacks:evaluate",
    "saving": "megalith.checkpoint.save:_write",
    "saving beside training": "megalith.checkpoint.save:_write",
}


def lines(place: str, nth: int, folder: Path, rank: int | None = None) -> list[str]:
    """Python code that makes every rank, or one, wait at the ``nth`` call of ``place``, for ``Program(first=...)``."""
    return ["from tests.resilience.pauses import pause", f"pause({place!r}, {nth}, {str(folder)!r}, {rank})"]


def pause(place: str, nth: int, folder: str, rank: int | None) -> None:
    """Installs the pause in this process and those that it forks."""
    module_name, _, name = PLACES[place].partition(":")
    module = importlib.import_module(module_name)
    function = getattr(module, name)
    num_calls = 0

    @functools.wraps(function)
    def paused(*args, **kwargs):
        nonlocal num_calls
        num_calls += 1
        this_rank = os.environ.get("RANK", "0")
        if num_calls == nth and (rank is None or this_rank == str(rank)):
            Path(folder, f"rank-{this_rank}").write_text(str(os.getpid()))
            while not Path(folder, "go").exists():
                time.sleep(0.01)
        return function(*args, **kwargs)

    setattr(module, name, paused)


class Pause:
    """The test's side of a pause: finds and releases the ranks that wait in ``folder``."""

    def __init__(self, folder: Path, ranks: Iterable[int]) -> None:
        self.folder = folder
        self.ranks = ranks

    def pids(self, timeout: float = 60) -> list[int]:
        """The processes of the ranks, in rank order, as soon as all of them wait."""
        deadline = time.monotonic() + timeout
        files = [self.folder / f"rank-{rank}" for rank in self.ranks]
        while not all(file.exists() and file.read_text() for file in files):
            assert time.monotonic() < deadline, "no rank got there"
            time.sleep(0.02)
        return [int(file.read_text()) for file in files]

    def end(self) -> None:
        """Lets all ranks continue."""
        (self.folder / "go").touch()
