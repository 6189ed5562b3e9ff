"""What waiting for torch.compile costs: announced when it begins, its progress shown, its time a span of its own."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from time import perf_counter

from megalith.observe.metrics import COMPILE
from megalith.observe.timers import Timers
from megalith.observe.units import duration
from megalith.torch_compat import watch_compiler

__all__ = ["CompilerWait"]

_BETWEEN_LINES = 5.0  # seconds


class CompilerWait:
    """Counts the builds of this process as ``COMPILE`` of ``timers``, apart from the spans that they interrupt.

    ``show`` takes the announcement, once; ``show_progress`` lines of which the next may replace the last.
    """

    def __init__(self, timers: Timers, show: Callable[[str], None], show_progress: Callable[[str], None]) -> None:
        self._show, self._show_progress = show, show_progress
        self._span = timers.interrupt(COMPILE)
        self._started = self._last_line = 0.0
        self._num_builds, self._seconds = 0, 0.0

    def watched(self) -> AbstractContextManager[None]:
        """What is built inside is counted."""
        return watch_compiler(self._begin, self._end)

    def _begin(self) -> None:
        self._started = perf_counter()
        if not self._num_builds:
            self._last_line = self._started
            self._show(
                "compiling the fused operations for this machine, once; later runs find them in torch's cache "
                "(TORCH_COMPILE_DISABLE=1 does without)"
            )
        self._span.__enter__()

    def _end(self) -> None:
        self._span.__exit__(None, None, None)
        now = perf_counter()
        self._num_builds += 1
        self._seconds += now - self._started
        if now - self._last_line >= _BETWEEN_LINES:
            self._last_line = now
            self._show_progress(f"compiling: {self._num_builds} built in {duration(self._seconds)}")
