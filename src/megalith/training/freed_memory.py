"""Returns freed memory to the operating system, on a CPU.

glibc keeps freed memory for later allocations, but tensors of many sizes with different lifetimes fragment it: a run
with sharded weights grows by megabytes per step, and never shrinks. Returning the free pages takes some tenths of a
second, and the next step takes longer to get them again, so it is done after the first step, and later only when there
are many.
"""

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path

from megalith.training.loop import Callback, FinishedStep
from megalith.training.run import Run

__all__ = ["FreedMemory", "page_returner"]

_GROWTH = 1.25  # growth of the memory held after a step that triggers a return of free pages
_HELD = Path("/proc/self/statm")


class FreedMemory(Callback):
    """Returns free pages after the first step, and once the process holds 25 % more than usual; nothing on a GPU.

    The first step leaves what building the model and compiling took. The usual amount is the most that the process held
    after a step that followed a return. So a run whose steps come to need more memory returns pages once, and not after
    every step.
    """

    def __init__(self, run: Run) -> None:
        self.trim = page_returner() if run.device.type == "cpu" else None
        self.usual = 0  # bytes
        self.has_returned = False  # whether pages were returned after the last step

    def on_step(self, run: Run, finished: FinishedStep) -> None:
        if self.trim is None:
            return
        held = _held()
        if self.has_returned:
            self.usual = max(self.usual, held)
        self.has_returned = held > _GROWTH * self.usual
        if self.has_returned:
            self.trim(0)


def page_returner() -> Callable[[int], object] | None:
    """glibc's ``malloc_trim``, which returns free pages and keeps the given number of bytes, or None."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def _held() -> int:
    """Returns the resident memory of this process in bytes."""
    return int(_HELD.read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
