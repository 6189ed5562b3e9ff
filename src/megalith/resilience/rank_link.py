"""What a rank and the process that supervises it tell each other, over a socket that the environment names.

A message is a line of JSON with one key: what happened. A rank that nobody supervises (torchrun's, or the only process)
tells nobody, and no code around the step needs to know.

To the supervisor: ``{"listening": true}`` the rank can be asked to stop · ``{"step": 3}`` it has finished step 3 ·
``{"asked": "SIGTERM: ..."}`` somebody sent it a signal · ``{"failed": {...}}`` a ``Failure`` · ``{"where": {...}}`` a
``Place``. To a rank: ``{"where": null}``, to be answered.
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

__all__ = ["Failure", "Lines", "Place", "answer_supervisor", "is_supervised", "tell", "tell_failure"]

_LINK = "MEGALITH_SUPERVISOR"


@dataclass(frozen=True)
class Failure:
    """The error that ends a rank.

    Attributes:
        text: a foreseen error's message, another one's traceback.
        code: the exit code that the rank ends with.
        foreseen: whether it is a MegalithError.
        on_every_rank: whether every rank tells the same.
        second_hand: whether it only says that another rank has failed.
    """

    text: str
    code: int
    foreseen: bool
    on_every_rank: bool = False
    second_hand: bool = False


@dataclass(frozen=True)
class Place:
    """Where the main thread of a rank is: the innermost line of ours, and whether it waits in torch.distributed."""

    line: str
    waits: bool


def is_supervised() -> bool:
    """Whether this very process is a rank that ``launch`` started; its children are not."""
    return _link() is not None


def tell(**message: Any) -> None:
    """Sends ``message`` to the supervisor, if there is one. Never waits: a supervisor that stands still misses some."""
    _send(message, socket.MSG_DONTWAIT)


def tell_failure(failure: Failure) -> None:
    """Tells the supervisor what ends this rank."""
    _send({"failed": asdict(failure)}, 0)  # waits: a traceback may be longer than the socket's buffer


def answer_supervisor(link: socket.socket) -> None:
    """Makes this process a rank that is supervised through ``link``, and ends it when the supervisor has died."""
    os.environ[_LINK] = f"{os.getpid()}:{link.fileno()}"
    threading.Thread(target=_answer, args=(link,), name="supervisor", daemon=True).start()


class Lines:
    """Messages out of the bytes of a stream, which may end within one."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> Iterator[dict[str, Any]]:
        """The messages that ``received`` completes."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        for line in lines:
            with suppress(ValueError):  # a full socket has cut it off
                yield json.loads(line)


def _link() -> int | None:
    process, _, descriptor = os.environ.get(_LINK, "").partition(":")
    return int(descriptor) if process == str(os.getpid()) else None


def _send(message: dict[str, Any], flags: int) -> None:
    if (descriptor := _link()) is None:
        return
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=descriptor)
    try:
        with suppress(OSError):  # full, or its other end has died, which _answer sees
            link.sendall(json.dumps(message).encode() + b"\n", flags)
    finally:
        link.detach()


def _answer(link: socket.socket) -> None:
    lines = Lines()
    with suppress(ConnectionError):
        while received := link.recv(4096):
            for _ in lines.feed(received):
                tell(where=asdict(_place()))
    os._exit(1)  # a rank without its supervisor would train on unseen, and hold the run's lock


def _place() -> Place:
    """Where this rank is; the whole stack goes to its log."""
    stack = traceback.extract_stack(sys._current_frames().get(threading.main_thread().ident or 0))
    with suppress(OSError):
        os.write(2, f"asked where it is, this rank is at:\n{''.join(traceback.format_list(stack))}".encode())
    waits = bool(stack) and _is_in("torch", "distributed", stack[-1].filename)
    ours = next((line for line in reversed(stack) if _is_in("megalith", line.filename)), None)
    where = "" if ours is None else f"{Path(ours.filename).parent.name}/{Path(ours.filename).name}:{ours.lineno}"
    return Place(where, waits)


def _is_in(*path: str) -> bool:
    *folders, file = path
    return f"{os.sep}{os.sep.join(folders)}{os.sep}" in file
