"""The signals that ask a program to end, with handlers that are taken back afterwards."""

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["FORWARDED", "REQUESTS", "Requests", "ended_by_exception", "handled", "heard_at_once"]

Handler = Callable[[signal.Signals], None]

# Ctrl-C, a scheduler's end, a closed terminal, a scheduler's warning
REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
# a request that somebody else counts: what a supervisor sends to its ranks
FORWARDED = signal.SIGUSR2
# programs such as timeout and uv pass on what the terminal or they themselves send to the whole process group as well
_SAME_REQUEST = 1.0  # seconds


class Requests:
    """Counts how often somebody asked, where one request may arrive as several signals within a second."""

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
    """Inside the ``with`` block ``handler`` is called with each of these signals that arrives, in the main thread.

    A signal that is ignored when the block begins (nohup) stays ignored. Only the main thread may set handlers: in any
    other the block changes nothing. The value of the block tells whether it did.
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
    """Inside the ``with`` block the first request to end raises SystemExit, with 128 + the signal's number.

    The default action of most of these signals ends a process without its ``finally`` clauses. Those that come while
    the first one is unwinding are ignored.
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
    """Inside the ``with`` block a thread calls ``handler`` with each signal that has a handler in Python.

    Python runs a handler between two bytecodes of the main thread, which may sit in a collective or a compiler for
    minutes; the thread hears meanwhile. Only the main thread may enter the block.
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
        writer.close()  # the end of what the thread reads
        thread.join()
        reader.close()
