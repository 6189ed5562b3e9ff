"""The signals that ask a program to end, with handlers that are restored afterwards."""

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["FORWARDED", "REQUESTS", "Requests", "ended_by_exception", "handled", "heard_at_once"]

Handler = Callable[[signal.Signals], None]

# Ctrl-C, the end of a scheduler's allocation, a closed terminal, a scheduler's warning
REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
# sent by a supervisor to its ranks; the supervisor counts the requests
FORWARDED = signal.SIGUSR2
# timeout, uv and similar programs forward signals that were also sent to the whole process group
_SAME_REQUEST = 1.0  # seconds


class Requests:
    """Counts requests to stop; several signals within a second count as one request."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.second: signal.Signals | None = None
        self._asked = 0.0

    def add(self, number: signal.Signals) -> None:
        """Counts a signal that has just arrived."""
        if self.first is None:
            self.first, self._asked = number, time.monotonic()
        elif time.monotonic() - self._asked > _SAME_REQUEST:
            self.second = number


@contextmanager
def handled(numbers: tuple[signal.Signals, ...], handler: Handler) -> Iterator[bool]:
    """Inside the ``with`` block, ``handler`` is called in the main thread with each of these signals that arrives.

    A signal that is ignored when the block begins (nohup) stays ignored. Only the main thread may set handlers; in any
    other thread the block does nothing. Yields whether any handler was installed.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        handler(signal.Signals(number))

    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in numbers}
        before = {number: action for number, action in before.items() if action is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, handle)
    try:
        yield bool(before)
    finally:
        for number, action in before.items():
            signal.signal(number, action)


@contextmanager
def ended_by_exception() -> Iterator[None]:
    """Inside the ``with`` block, the first request to end raises SystemExit, with 128 + the signal's number.

    The default action of most of these signals ends a process without running its ``finally`` clauses. Signals that
    arrive while the first one unwinds the stack are ignored.
    """
    requests = Requests()

    def leave(number: signal.Signals) -> None:
        if requests.first is None:
            requests.add(number)
            raise SystemExit(128 + number)

    with handled(REQUESTS, leave):
        yield


@contextmanager
def heard_at_once(handler: Handler) -> Iterator[None]:
    """Inside the ``with`` block, a thread calls ``handler`` with each signal that has a Python handler.

    Python runs handlers between two bytecodes of the main thread, which may be in a collective or a compiler for
    minutes; the thread gets the signal meanwhile. Only the main thread may enter the block.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def listen() -> None:
        while numbers := reader.recv(64):
            for number in numbers:
                handler(signal.Signals(number))

    thread = threading.Thread(target=listen, name="stop signals", daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writer.close()  # end of file for the thread
        thread.join()
        reader.close()
