"""Messages between a rank and its supervisor, over a socket named by an environment variable.

A message is a line of JSON with one key, the event. On a rank without a supervisor (started by torchrun, or the only
process), sending does nothing, so callers need not check.

To the supervisor: ``{"listening": true}`` the rank can be asked to stop · ``{"step": 3}`` it has finished step 3 ·
``{"asked": "SIGTERM: ..."}`` it received a signal · ``{"failed": {...}}`` a ``Failure`` · ``{"where": {...}}`` a
``Place``. To a rank: ``{"where": null}``, a request for its ``Place``.
"""

import json
import os
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megalith.errors import MegalithError, RankFailedError

__all__ = ["Failure", "Lines", "Place", "answer_supervisor", "is_supervised", "tell", "tell_failure"]

_LINK = "MEGALITH_SUPERVISOR"


@dataclass(frozen=True)
class Failure:
    """The error that ends a rank.

    Attributes:
        text: the message of an expected error, the traceback of any other.
        code: the exit code of the rank.
        foreseen: whether the error is expected, that is, a MegalithError.
        on_every_rank: whether every rank reports the same.
        second_hand: whether it only says that another rank has failed.
        of_connection: whether a collective raised it, which may be because another rank has ended.
    """

    text: str
    code: int
    foreseen: bool
    on_every_rank: bool = False
    second_hand: bool = False
    of_connection: bool = False

    @classmethod
    def foreseen_error(cls, error: MegalithError, code: int) -> "Failure":
        """Returns the report of an expected error."""
        return cls(str(error), code, True, error.on_every_rank, isinstance(error, RankFailedError))

    @classmethod
    def unforeseen_error(cls, error: BaseException) -> "Failure":
        """Returns the report of any other error, with its traceback."""
        text = "".join(traceback.format_exception(error))
        return cls(text, 1, foreseen=False, of_connection=_is_of_connection(error))


@dataclass(frozen=True)
class Place:
    """Where the main thread of a rank is: the innermost line of Megalith, and whether it waits in torch.distributed."""

    line: str
    waits: bool


def is_supervised() -> bool:
    """Returns whether this process is a rank that ``launch`` started; false in its child processes."""
    return _link() is not None


def tell(**message: Any) -> None:
    """Sends ``message`` to the supervisor, if any. Never blocks: a supervisor that does not read misses messages."""
    _send(message, socket.MSG_DONTWAIT)


def tell_failure(failure: Failure) -> None:
    """Reports to the supervisor the error that ends this rank."""
    _send({"failed": asdict(failure)}, 0)  # blocks: a traceback may be longer than the socket's buffer


def answer_supervisor(link: socket.socket) -> None:
    """Makes this process a rank supervised through ``link``; it exits when the supervisor has died."""
    os.environ[_LINK] = f"{os.getpid()}:{link.fileno()}"
    threading.Thread(target=_answer, args=(link,), name="supervisor", daemon=True).start()


class Lines:
    """Splits a byte stream into messages; chunks may end within a message."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> Iterator[dict[str, Any]]:
        """Yields the messages completed by ``received``."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        for line in lines:
            with suppress(ValueError):  # truncated because the socket was full
                yield json.loads(line)


def _link() -> int | None:
    process, _, descriptor = os.environ.get(_LINK, "").partition(":")
    return int(descriptor) if process == str(os.getpid()) else None


def _send(message: dict[str, Any], flags: int) -> None:
    if (descriptor := _link()) is None:
        return
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=descriptor)
    try:
        with suppress(OSError):  # full, or the other end has died, which _answer detects
            link.sendall(json.dumps(message).encode() + b"\n", flags)
    finally:
        link.detach()


def _answer(link: socket.socket) -> None:
    lines = Lines()
    with suppress(ConnectionError):
        while received := link.recv(4096):
            for _ in lines.feed(received):
                tell(where=asdict(_place()))
    os._exit(1)  # a rank without its supervisor would keep training unnoticed, and hold the run's lock


def _place() -> Place:
    """Returns where this rank is, and writes the whole stack to its log."""
    stack = traceback.extract_stack(sys._current_frames().get(threading.main_thread().ident or 0))
    with suppress(OSError):
        os.write(
            2,
            f"asked by the supervisor where it is, this rank is at:\n{''.join(traceback.format_list(stack))}".encode(),
        )
    waits = bool(stack) and _is_in("torch", "distributed", stack[-1].filename)
    ours = next((line for line in reversed(stack) if _is_in("megalith", line.filename)), None)
    where = "" if ours is None else f"{Path(ours.filename).parent.name}/{Path(ours.filename).name}:{ours.lineno}"
    return Place(where, waits)


def _is_of_connection(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    # work.wait() raises where it is called: NCCL a DistError, gloo a RuntimeError that names its own source
    is_dist_error = any(kind.__name__ == "DistError" for kind in type(error).__mro__)
    raised_inside = bool(frames) and _is_in("torch", "distributed", frames[-1].filename)
    return is_dist_error or raised_inside or f"gloo{os.sep}transport" in str(error)


def _is_in(*path: str) -> bool:
    *folders, file = path
    return f"{os.sep}{os.sep.join(folders)}{os.sep}" in file
