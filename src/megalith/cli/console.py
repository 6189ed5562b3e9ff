"""Lines for a person: messages that stay, and in a terminal one progress line that renews itself."""

import shutil
import sys

__all__ = ["Console"]


class Console:
    """Writes to standard output; in a file or pipe every progress line stays too."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._open = False

    def show(self, line: str) -> None:
        """A line that stays."""
        self.close()
        print(line, flush=True)

    def show_progress(self, line: str) -> None:
        """A line that the next one may replace."""
        if not self._terminal:
            print(line, flush=True)
            return
        width = shutil.get_terminal_size().columns - 1
        print("\r" + line[:width].ljust(width), end="", flush=True)
        self._open = True

    def close(self) -> None:
        """Leaves the progress line standing and begins a new one."""
        if self._open:
            print(flush=True)
            self._open = False
