"""Terminal output: messages, progress lines that are overwritten in a terminal, announcements of slow operations."""

import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable
from time import perf_counter
from types import TracebackType
from typing import TextIO

from megalith.errors import StorageError
from megalith.observe.progress import shortened
from megalith.observe.units import duration

__all__ = [
    "Announcer",
    "Console",
    "ConsoleHandler",
    "Progress",
    "printable",
    "say",
    "say_over",
    "show_log",
    "show_text",
]

_ANNOUNCED_AFTER = 2.0  # seconds
_IN_TERMINAL, _IN_FILE = 0.2, 10.0  # seconds between progress lines


def say(line: str) -> None:
    """Writes ``line`` to standard error and flushes it, because ranks share the terminal."""
    _print(sys.stderr, line)


def say_over(line: str) -> None:
    """Like ``say``, but overwrites a progress line that another process may have left in the same terminal."""
    if sys.stderr.isatty():
        first, *rest = line.split("\n")
        line = "\n".join(["\r" + first.ljust(_width()), *rest])
    say(line)


def show_text(text: str, end: str = "\n") -> None:
    """Writes a command's result, or a part of it, to standard output. Raises StorageError if writing fails."""
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        raise  # the reader closed the pipe: typer ends the command silently
    except OSError as error:
        _drop_what_follows(sys.stdout)
        raise StorageError(
            f"cannot write to standard output: {error.strerror}; send it to a file on a disk with room"
        ) from error


def printable(text: str) -> str:
    """``text`` with unprintable characters escaped, which could move the cursor or change the terminal's colours."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


class Console:
    """Writes lines to ``stream``, by default standard output; in a file or pipe all progress lines are kept.

    If the stream has no reader any more (a closed terminal or pipe), lines are dropped and the run continues.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._terminal = self._stream.isatty()
        self._open = False

    @property
    def is_terminal(self) -> bool:
        """Whether a progress line replaces the previous one."""
        return self._terminal

    def show(self, line: str) -> None:
        """Shows a permanent line."""
        self.close()
        _print(self._stream, line)

    def show_progress(self, line: str) -> None:
        """Shows a line that the next one may replace."""
        if not self._terminal:
            _print(self._stream, line)
            return
        width = _width()
        _print(self._stream, "\r" + shortened(line, width)[:width].ljust(width), end="")
        self._open = True

    def close(self) -> None:
        """Keeps the current progress line and begins a new line."""
        if self._open:
            _print(self._stream, "")
            self._open = False


class ConsoleHandler(logging.Handler):
    """Shows log records as permanent lines."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Shows one record."""
        self._console.show(self.format(record))


def show_log(console: Console) -> None:
    """Shows what is logged in this process on ``console``, except for debug messages."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[ConsoleHandler(console)])


class Progress:
    """Shows periodically how much is done and how long the rest will take, as a progress line.

    ``spelled`` formats the amounts done and total. The clock starts at the first call, because the time before it
    includes compilation.
    """

    def __init__(self, console: Console, spelled: Callable[[int, int], str]) -> None:
        self._console = console
        self._spelled = spelled
        self._interval = _IN_TERMINAL if console.is_terminal else _IN_FILE
        self._first: tuple[float, int] | None = None  # time and amount done at the first call
        self._shown = perf_counter()

    def __call__(self, done: int, total: int) -> None:
        now = perf_counter()
        if self._first is None:
            self._first = now, done
        if now - self._shown < self._interval:
            return
        self._shown = now
        started, first = self._first
        line = self._spelled(done, total)
        if done > first:
            line += f", {duration((now - started) / (done - first) * (total - done))} left"
        self._console.show_progress(line)


class Announcer:
    """Announces an operation, by default on standard error, if it takes longer than two seconds.

    As a context manager, it cancels a pending announcement at the end of the block.
    """

    def __init__(self, show: Callable[[str], None] | None = None) -> None:
        self._show = show or say
        self._timer: threading.Timer | None = None

    def begin(self, what: str) -> None:
        """Starts the operation ``what``, and ends the previous one."""
        self.end()
        self._timer = threading.Timer(_ANNOUNCED_AFTER, lambda: self._show(f"{what} ..."))
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        """Ends the current operation."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def __enter__(self) -> "Announcer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def _width() -> int:
    """Characters per line; the last column is kept free, because some terminals would wrap the line."""
    return shutil.get_terminal_size().columns - 1


def _print(stream: TextIO, text: str, end: str = "\n") -> None:
    try:
        print(text, end=end, file=stream, flush=True)
    except OSError:
        _drop_what_follows(stream)


def _drop_what_follows(stream: TextIO) -> None:
    """Redirects ``stream`` to /dev/null; flushing its buffer at exit would fail again and change the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
