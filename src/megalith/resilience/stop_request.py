"""Requests to stop a run at the next step boundary: by a signal, or by a time limit.

The first signal requests a stop, the second ends the process at once. A scheduler may signal only one process; the
ranks agree through the step's own reduction, so that all stop together.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

from megalith.resilience.stop_signals import FORWARDED, REQUESTS, Requests, handled, heard_at_once

__all__ = ["SAVING", "TIME_LIMIT", "StopRequest"]

SAVING = "saving at the next step boundary; signal again to quit now"
TIME_LIMIT = "the time limit"


class StopRequest:
    """Inside the ``with`` block, the first signal sets ``reason`` instead of ending the process; a second one ends it.

    The exit code is then 128 + the signal's number. ``announce`` is called with a line at each of the two, from a
    separate thread. A signal forwarded by a supervisor only sets ``reason``: the supervisor counts and announces.
    """

    def __init__(self, announce: Callable[[str], None]) -> None:
        self._announce = announce
        self._started = time.monotonic()
        self._deadline: float | None = None
        self._signal: str | None = None
        self._requests = Requests()
        self._stack = ExitStack()

    @property
    def reason(self) -> str | None:
        """Why this process was asked to stop, or None."""
        if self._signal is None and self._deadline is not None and time.monotonic() >= self._deadline:
            return TIME_LIMIT
        return self._signal

    def limit_time(self, minutes: float | None) -> None:
        """Requests a stop ``minutes`` after this object was created; None: never."""
        self._deadline = None if minutes is None else self._started + 60.0 * minutes

    def __enter__(self) -> "StopRequest":
        with ExitStack() as stack:
            if stack.enter_context(handled((*REQUESTS, FORWARDED), self._note)):
                stack.enter_context(heard_at_once(self._count))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _note(self, number: signal.Signals) -> None:
        self._signal = self._signal or number.name

    def _count(self, number: signal.Signals) -> None:
        self._note(number)
        if number not in REQUESTS:
            return
        known = self._requests.first
        self._requests.add(number)
        if self._requests.second is not None:
            self._announce(f"{number.name}: quit")
            os._exit(128 + number)
        elif known is None:
            self._announce(f"{number.name}: {SAVING}")
