"""How much a call does, as a count: the same on every machine, where seconds are not."""

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

__all__ = ["Effort", "effort"]


class Effort(NamedTuple):
    """Lines of Python that ran, each turn of a loop counted, and the most bytes held at once."""

    lines: int
    peak_bytes: int


def effort(run: Callable[[], object]) -> Effort:
    """What ``run()`` takes."""
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
