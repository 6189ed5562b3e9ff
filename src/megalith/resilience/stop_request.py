"""Requests to stop a run at the next step boundary: SIGTERM, SIGUSR1, or the end of its time.

A scheduler asks one process, perhaps; the ranks agree through the step's own reduction, so that all stop together.
"""

import logging
import signal
import time
from types import FrameType, TracebackType

__all__ = ["StopRequest"]

log = logging.getLogger(__name__)
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Inside the ``with`` block the signals set ``reason`` instead of ending the process.

    ``time_limit`` is in minutes from the construction of this object; None: no limit.
    """

    def __init__(self, time_limit: float | None) -> None:
        self._deadline = None if time_limit is None else time.monotonic() + 60.0 * time_limit
        self._signal: str | None = None
        self._handlers: dict[int, object] = {}

    @property
    def reason(self) -> str | None:
        """Why this process was asked to stop, or None."""
        if self._signal is None and self._deadline is not None and time.monotonic() >= self._deadline:
            return "the time limit"
        return self._signal

    def __enter__(self) -> "StopRequest":
        self._handlers = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned, given back

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number).name
