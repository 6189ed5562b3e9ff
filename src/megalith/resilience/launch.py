"""Starts the ranks of a run on this machine and watches over them: what ``--nproc`` stands for.

Ranks are forked from a server that has imported torch once (``rank_server``), each in a session of its own, so that a
Ctrl-C of the terminal reaches this process alone. A first signal to it, or to any rank, is passed on to all ranks,
which save at the step boundary; a second one ends them. Ctrl-Z suspends them too. Where a rank fails, the others are
ended and the first cause is told. Where this process dies, the ranks end (``rank_link``, ``parent_death``). The
standard error of all ranks, and the output of all but rank 0, goes to files.
"""

import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from megalith.resilience.rank_link import Failure, Lines, Place, answer_supervisor
from megalith.resilience.rank_server import end_with_server, ensure_running
from megalith.resilience.stop_request import SAVING
from megalith.resilience.stop_signals import FORWARDED, REQUESTS, Requests, handled
from megalith.resilience.verdict import SAVED, SERVER_DIED, Ended, Verdict, judge
from megalith.storage.failures import explained

__all__ = ["RENDEZVOUS", "launch"]

# names the init_method of torch.distributed: a file, because a port that is free now may be taken later
RENDEZVOUS = "MEGALITH_RENDEZVOUS"
# what every rank imports before its first step, once for all of them
_PRELOAD = ["megalith.training.pretrain", "torch._dynamo"]
_TICK = 0.1  # seconds
_GRACE = 1.0  # seconds in which ranks that failed together tell why


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
            os.close(_open_log(file))
    say(f"starting {num_ranks} ranks")
    ranks: list[_Rank] = []
    watch = _Watch(ranks, say, stall_seconds)
    with (
        handled(REQUESTS, watch.requests.add),
        handled((signal.SIGTSTP,), watch.suspensions.append),
        tempfile.TemporaryDirectory(prefix="megalith-") as folder,
        _ended_with_the_block(ranks),
    ):
        try:
            for number, file in enumerate(files):
                ranks.append(_start(number, num_ranks, arguments, file, Path(folder, "store")))
        except (EOFError, ConnectionError):  # it was to answer with the number of the process that it forked
            verdict = SERVER_DIED
        else:
            verdict = watch.until_the_end()
    way_on = f"{goes_on()} (what each rank printed: {logs})" if verdict.goes_on else ""
    if verdict.message or way_on:
        joint = "\n" if "\n" in verdict.message else "; "
        say(joint.join(filter(None, (verdict.message, way_on))))
    return verdict.code


@dataclass
class _Rank:
    """A rank as its supervisor sees it."""

    number: int
    process: BaseProcess
    link: socket.socket
    lines: Lines = field(default_factory=Lines)
    listening: bool = False
    step: int | None = None
    failure: Failure | None = None
    place: Place | None = None

    def signal(self, number: int) -> None:
        """Sends it a signal, if it lives."""
        if self.process.is_alive() and self.process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have come from it."""
        received = []
        with suppress(BlockingIOError, ConnectionError):
            while part := self.link.recv(1 << 16, socket.MSG_DONTWAIT):
                received.append(part)
        return list(self.lines.feed(b"".join(received)))

    def ask_where(self) -> None:
        """Asks it where it is; the answer comes as ``place``, if it can."""
        self.place = None
        with suppress(OSError):
            self.link.send(b'{"where": null}\n', socket.MSG_DONTWAIT)


def _start(number: int, num_ranks: int, arguments: Sequence[str], log: Path, store: Path) -> _Rank:
    # a fork of this process would share the locks of its threads; on macOS the system's libraries survive no fork
    darwin = sys.platform == "darwin"
    context = multiprocessing.get_context("spawn") if darwin else multiprocessing.get_context("forkserver")
    if not darwin:
        ensure_running(_PRELOAD)
    environment = {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        RENDEZVOUS: store.as_uri(),
    }
    ours, theirs = socket.socketpair()
    with theirs:
        process = context.Process(target=_rank_main, args=(environment, tuple(arguments), theirs, log))
        process.start()
    return _Rank(number, process, ours)


@contextmanager
def _ended_with_the_block(ranks: list[_Rank]) -> Iterator[None]:
    try:
        yield
    finally:
        for rank in ranks:
            rank.process.kill()
        for rank in ranks:
            rank.process.join()
            rank.link.close()


def _rank_main(environment: dict[str, str], arguments: tuple[str, ...], link: socket.socket, log: Path) -> None:
    """One rank: ``python -m megalith ARGUMENTS``."""
    os.setsid()
    end_with_server()
    written = _open_log(log)
    os.dup2(written, 2)
    if environment["RANK"] != "0":
        os.dup2(written, 1)
    os.close(written)
    os.environ.update(environment)
    answer_supervisor(link)
    sys.argv = ["megalith", *arguments]
    runpy.run_module("megalith", run_name="__main__")


def _open_log(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)


class _Watch:
    """Follows the ranks until all have ended, or one has failed and the others were ended for it."""

    def __init__(self, ranks: list[_Rank], say: Callable[[str], None], stall_seconds: float) -> None:
        self.ranks = ranks
        self.say = say
        self.requests = Requests()  # filled by a handler of signals, which does nothing else
        self.suspensions: list[signal.Signals] = []  # the same: each a Ctrl-Z
        self.ended: list[Ended] = []
        self.stopping = False
        self.patience = self.stall_seconds = stall_seconds
        self.progress = time.monotonic()

    def until_the_end(self) -> Verdict:
        """Waits for the ranks; returns how the run ended."""
        while len(self.ended) < len(self.ranks):
            self._look(_TICK)
            if self.suspensions:
                self._suspend()
            if self.requests.second is not None:
                return Verdict(128 + self.requests.second, f"{self.requests.second.name}: quit", goes_on=True)
            if self.requests.first is not None:
                self._stop(f"{self.requests.first.name}: {SAVING}")
            if any(one.code not in (0, SAVED) for one in self.ended):
                self._look_until(lambda: len(self.ended) == len(self.ranks))
                break
            if time.monotonic() - self.progress > self.patience:
                self._tell_of_a_stall()
        return judge(self.ended)

    def _living(self) -> list[_Rank]:
        ended = {one.rank for one in self.ended}
        return [rank for rank in self.ranks if rank.number not in ended]

    def _look_until(self, enough: Callable[[], bool]) -> None:
        """Takes in what happens until ``enough``, or for a moment."""
        deadline = time.monotonic() + _GRACE
        while not enough() and time.monotonic() < deadline:
            self._look(_TICK)

    def _look(self, seconds: float) -> None:
        """Takes in what has happened to the ranks, waiting for it for up to ``seconds``."""
        living = self._living()
        ready = wait([*(rank.link for rank in living), *(rank.process.sentinel for rank in living)], seconds)
        for rank in living:
            over = rank.process.sentinel in ready
            for message in rank.receive():
                self._take_in(rank, message)
            if over:
                rank.process.join()
                self.ended.append(Ended(rank.number, rank.process.exitcode or 0, rank.failure))

    def _take_in(self, rank: _Rank, message: dict[str, Any]) -> None:
        match message:
            case {"listening": _}:
                rank.listening = True
                if self.stopping:
                    rank.signal(FORWARDED)
            case {"step": int(step)}:
                rank.step = step
                self.progress, self.patience = time.monotonic(), self.stall_seconds
            case {"asked": str(line)}:
                self._stop(f"rank {rank.number}: {line}")
            case {"failed": dict(failure)}:
                rank.failure = Failure(**failure)
            case {"where": dict(place)}:
                rank.place = Place(**place)

    def _stop(self, line: str) -> None:
        """Asks every rank, once, to stop at the step boundary."""
        if self.stopping:
            return
        self.stopping = True
        self.say(line)
        for rank in self._living():
            if rank.listening:  # else when it says that it is
                rank.signal(FORWARDED)

    def _suspend(self) -> None:
        """Stops the ranks and then this process, which the terminal reaches alone, until somebody continues it."""
        for rank in self._living():
            rank.signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self.suspensions.clear()
        for rank in self._living():
            rank.signal(signal.SIGCONT)
        self.progress = time.monotonic()

    def _tell_of_a_stall(self) -> None:
        """Says which rank the others wait for; again after twice the time."""
        silence, self.patience = self.patience, 2 * self.patience
        for rank in self._living():
            rank.ask_where()
        self._look_until(lambda: all(rank.place for rank in self._living()))
        standing = [rank for rank in self._living() if rank.place is None or not rank.place.waits]
        if not standing or len(standing) == len(self._living()):
            standing = self._living()
            what = f"no step in {silence:.0f} s"
        else:
            what = f"waiting for rank{'s' * (len(standing) > 1)} {', '.join(str(rank.number) for rank in standing)}"
        steps = [rank.step for rank in self.ranks if rank.step is not None]
        since = f"since step {max(steps)}" if steps else "since the start"
        self.say(f"{what} {since}: {'; '.join(map(_where, standing))}")


def _where(rank: _Rank) -> str:
    place = "does not answer" if rank.place is None else f"is at {rank.place.line or 'no line of Megalith'}"
    return f"rank {rank.number} {place}"
