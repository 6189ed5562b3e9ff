"""Lines for a person: messages that stay, and in a terminal one progress line that renews itself."""

import os
import shutil
import sys
from contextlib import suppress

__all__ = ["Console", "say"]


def say(line: str) -> None:
    """Writes ``line`` to standard error, at once because ranks share the screen."""
    with suppress(OSError):  # a terminal that was closed is no reason to lose a run
        print(line, file=sys.stderr, flush=True)


class Console:
    """Writes to standard output; in a file or pipe every progress line stays too.

    Where nobody reads any more (a closed terminal, a pipe whose reader has ended) lines are dropped, and the run
    goes on.
    """

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._open = False

    def show(self, line: str) -> None:
        """A line that stays."""
        self.close()
        _print(line)

    def show_progress(self, line: str) -> None:
        """A line that the next one may replace."""
        if not self._terminal:
            _print(line)
            return
        width = shutil.get_terminal_size().columns - 1
        _print("\r" + line[:width].ljust(width), end="")
        self._open = True

    def close(self) -> None:
        """Leaves the progress line standing and begins a new one."""
        if self._open:
            _print("")
            self._open = False


def _print(text: str, end: str = "\n") -> None:
    try:
        print(text, end=end, flush=True)
    except OSError:
        # what is left in the buffer would fail again when Python ends, and change the exit code
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
