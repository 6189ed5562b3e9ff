"""The work of a call, as counts that are the same on every machine, unlike seconds."""

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

__all__ = ["Effort", "effort"]


class Effort(NamedTuple):
    """Lines of Python executed, counting every loop iteration, and the peak bytes allocated."""

    lines: int
    peak_bytes: int


def effort(run: Callable[[], object]) -> Effort:
    """Measures the effort of ``run()``."""
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    tracemalloc.start()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return Effort(lines, peak)
