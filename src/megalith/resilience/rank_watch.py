"""Starts ranks on this machine, and supervises them until they have ended.

Ranks are forked from a server that has imported torch once (``rank_server``), each in its own session, so that the
terminal's Ctrl-C reaches only this process. If this process dies, the ranks end (``rank_link``, ``parent_death``).
"""

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from megalith.errors import RankFailedError
from megalith.resilience.rank_link import Failure, Lines, Place, answer_supervisor
from megalith.resilience.rank_server import end_with_server, ensure_running
from megalith.resilience.stop_request import SAVING
from megalith.resilience.stop_signals import FORWARDED, Requests
from megalith.resilience.verdict import SAVED, SERVER_DIED, Ended, Verdict, judge

__all__ = ["RENDEZVOUS", "Rank", "Watch", "ended_with_the_block", "open_log", "start_rank", "start_server"]

# holds the init_method of torch.distributed: a file, because a port that is free now may be taken later
RENDEZVOUS = "MEGALITH_RENDEZVOUS"
# imported once, for all ranks, before they are forked
_PRELOAD = ["megalith.training.pretrain", "torch._dynamo"]
_FORKS = sys.platform != "darwin"  # the system libraries of macOS are not fork-safe
_TICK = 0.1  # seconds
_GRACE = 1.0  # seconds for ranks that failed together to report why


@dataclass
class Rank:
    """A rank, as seen by its supervisor."""

    number: int
    process: BaseProcess
    link: socket.socket
    lines: Lines = field(default_factory=Lines)
    listening: bool = False
    step: int | None = None
    failure: Failure | None = None
    place: Place | None = None

    def signal(self, number: int) -> None:
        """Sends a signal to the rank, if it is alive."""
        if self.process.is_alive() and self.process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def receive(self) -> list[dict[str, Any]]:
        """Returns the messages received from the rank."""
        received = []
        with suppress(BlockingIOError, ConnectionError):
            while part := self.link.recv(1 << 16, socket.MSG_DONTWAIT):
                received.append(part)
        return list(self.lines.feed(b"".join(received)))

    def ask_where(self) -> None:
        """Asks the rank where it is; the answer, if any, is stored in ``place``."""
        self.place = None
        with suppress(OSError):
            self.link.send(b'{"where": null}\n', socket.MSG_DONTWAIT)


def start_server() -> None:
    """Starts the process that ranks are forked from, which takes seconds to import torch; returns at once."""
    if _FORKS:
        ensure_running(_PRELOAD)


def start_rank(number: int, num_ranks: int, store: Path, log: Path, main: Callable[..., None], *arguments: Any) -> Rank:
    """Starts ``main(*arguments)`` as rank ``number``, with torchrun's variables in its environment.

    ``store`` is the file used for rendezvous. Standard error, and the output of all ranks but 0, goes to ``log``.

    Raises:
        RankFailedError: the process that ranks are forked from has died.
    """
    # forking this process would copy locks held by its threads
    context = multiprocessing.get_context("forkserver") if _FORKS else multiprocessing.get_context("spawn")
    start_server()
    environment = {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        RENDEZVOUS: store.as_uri(),
    }
    ours, theirs = socket.socketpair()
    with theirs:
        process = context.Process(target=_rank_main, args=(environment, theirs, log, main, arguments))
        try:
            process.start()
        except (EOFError, ConnectionError) as error:  # the server should have answered with the pid of its fork
            ours.close()
            raise RankFailedError(SERVER_DIED.message) from error
    return Rank(number, process, ours)


@contextmanager
def ended_with_the_block(ranks: list[Rank]) -> Iterator[None]:
    """Kills the remaining ``ranks`` when the ``with`` block ends, however it ends."""
    try:
        yield
    finally:
        for rank in ranks:
            rank.process.kill()
        for rank in ranks:
            rank.process.join()
            rank.link.close()


def open_log(path: Path) -> int:
    """Returns a file descriptor that appends to ``path``."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)


def _rank_main(
    environment: dict[str, str], link: socket.socket, log: Path, main: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    os.setsid()
    end_with_server()
    written = open_log(log)
    os.dup2(written, 2)
    if environment["RANK"] != "0":
        os.dup2(written, 1)
    os.close(written)
    os.environ.update(environment)
    answer_supervisor(link)
    main(*arguments)


class Watch:
    """Supervises the ranks until all have ended, or one has failed and the others were ended because of it.

    After ``stall_seconds`` without a step, it reports through ``say`` which rank the others wait for; with ``gives_up``
    the run ends then.
    """

    def __init__(
        self, ranks: list[Rank], say: Callable[[str], None], stall_seconds: float, *, gives_up: bool = False
    ) -> None:
        self.ranks = ranks
        self.say = say
        self.requests = Requests()  # filled by a signal handler, which does nothing else
        self.suspensions: list[signal.Signals] = []  # likewise; one entry per Ctrl-Z
        self.ended: list[Ended] = []
        self.stopping = False
        self.patience = self.stall_seconds = stall_seconds
        self.gives_up = gives_up
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
                stall = self._stall()
                if self.gives_up:
                    return Verdict(1, stall)
                self.say(stall)
        return judge(self.ended)

    def _living(self) -> list[Rank]:
        ended = {one.rank for one in self.ended}
        return [rank for rank in self.ranks if rank.number not in ended]

    def _look_until(self, enough: Callable[[], bool]) -> None:
        """Processes events until ``enough()`` is true, or for ``_GRACE`` seconds."""
        deadline = time.monotonic() + _GRACE
        while not enough() and time.monotonic() < deadline:
            self._look(_TICK)

    def _look(self, seconds: float) -> None:
        """Processes events of the ranks, waiting up to ``seconds`` for the first."""
        living = self._living()
        ready = wait([*(rank.link for rank in living), *(rank.process.sentinel for rank in living)], seconds)
        for rank in living:
            over = rank.process.sentinel in ready
            for message in rank.receive():
                self._take_in(rank, message)
            if over:
                rank.process.join()
                self.ended.append(Ended(rank.number, rank.process.exitcode or 0, rank.failure))

    def _take_in(self, rank: Rank, message: dict[str, Any]) -> None:
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
            if rank.listening:  # otherwise once it reports that it is
                rank.signal(FORWARDED)

    def _suspend(self) -> None:
        """Stops the ranks, then this process (Ctrl-Z reaches only this one), until it is continued."""
        for rank in self._living():
            rank.signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self.suspensions.clear()
        for rank in self._living():
            rank.signal(signal.SIGCONT)
        self.progress = time.monotonic()

    def _stall(self) -> str:
        """Returns which rank the others wait for; the next report comes after twice the time."""
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
        return f"{what} {since}: {'; '.join(map(_where, standing))}"


def _where(rank: Rank) -> str:
    place = "does not answer" if rank.place is None else f"is at {rank.place.line or 'a line outside of Megalith'}"
    return f"rank {rank.number} {place}"
