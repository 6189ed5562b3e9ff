"""Measures the time spent waiting for torch.compile in a separate span, announces it, and shows its progress."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from megalith.observe.metrics import COMPILE
from megalith.observe.timers import Timers
from megalith.observe.units import duration
from megalith.torch_compat.compiler import watch_compiler

__all__ = ["CompilerWait"]

_BETWEEN_LINES = 5.0  # seconds
_TICK = 1.0  # seconds between checks of a running build


class CompilerWait:
    """Records this process's compilations as ``COMPILE`` in ``timers``, excluded from the spans that they interrupt.

    ``show`` receives one announcement; ``show_progress`` receives lines, each of which may replace the previous one.
    """

    def __init__(self, timers: Timers, show: Callable[[str], None], show_progress: Callable[[str], None]) -> None:
        self._show, self._show_progress = show, show_progress
        self._span = timers.interrupt(COMPILE)
        self._started = self._last_line = 0.0
        self._num_builds, self._seconds = 0, 0.0
        self._building = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Counts the compilations inside the ``with`` block."""
        over = threading.Event()
        thread = threading.Thread(target=self._tick, args=(over,), name="compiler wait", daemon=True)
        thread.start()
        try:
            with watch_compiler(self._begin, self._end):
                yield
        finally:
            over.set()
            thread.join()

    def _tick(self, over: threading.Event) -> None:
        """Shows periodically that a long build is still running, because the building thread cannot report it."""
        while not over.wait(_TICK):
            now = perf_counter()
            if self._building and now - self._last_line >= _BETWEEN_LINES:
                self._show_count(now, self._seconds + now - self._started)

    def _begin(self) -> None:
        self._started = perf_counter()
        self._building = True
        if not self._num_builds:
            self._last_line = self._started
            self._show(
                "torch.compile is compiling for this machine, once; later runs load the results from torch's cache "
                "(TORCH_COMPILE_DISABLE=1 turns this off)"
            )
        self._span.__enter__()

    def _end(self) -> None:
        self._span.__exit__(None, None, None)
        now = perf_counter()
        self._building = False
        self._num_builds += 1
        self._seconds += now - self._started
        if now - self._last_line >= _BETWEEN_LINES:
            self._show_count(now, self._seconds)

    def _show_count(self, now: float, seconds: float) -> None:
        self._last_line = now
        self._show_progress(f"compiling: {self._num_builds} built in {duration(seconds)}")
