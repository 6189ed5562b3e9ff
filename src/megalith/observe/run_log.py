"""``RUN/logs/run.log``: every line that a run shows, with its time, and Megalith's log records."""

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from megalith.storage.failures import explained

__all__ = ["RunLog"]

log = logging.getLogger(__name__)
_FORMAT = logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S")


class RunLog:
    """Inside the ``with`` block, lines of ``kept`` functions and Megalith's log records are also appended to the file.

    If the disk fills up later, logging ends, but the run continues.

    Raises:
        StorageError: the file cannot be created.
    """

    def __init__(self, path: Path) -> None:
        with explained("write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._handler = _Quiet(path, encoding="utf-8", errors="backslashreplace")
        self._handler.setFormatter(_FORMAT)

    def kept(self, show: Callable[[str], None]) -> Callable[[str], None]:
        """Wraps ``show`` so that each line is also written to the file."""

        def show_and_keep(line: str) -> None:
            self._handler.handle(log.makeRecord(log.name, logging.INFO, "", 0, line.strip("\n"), (), None))
            show(line)

        return show_and_keep

    def __enter__(self) -> "RunLog":
        logging.getLogger("megalith").addHandler(self._handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        logging.getLogger("megalith").removeHandler(self._handler)
        with suppress(OSError):
            self._handler.close()


class _Quiet(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # the name that logging calls
        """Ignores the error: the line was already shown."""
