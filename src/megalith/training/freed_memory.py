"""Returns freed memory to the operating system, on a CPU.

glibc keeps freed memory for later allocations, but tensors of many sizes with different lifetimes fragment it: a run
with sharded weights grows by megabytes per step, and never shrinks. Returning the free pages takes some tenths of a
second, and the next step takes longer to get them again, so it is done only when there are many.
"""

import ctypes
import os
import sys
from pathlib import Path

from megalith.training.loop import Callback, FinishedStep
from megalith.training.run import Run

__all__ = ["FreedMemory"]

_GROWTH = 1.25  # growth of the memory held after a step that triggers a return of free pages
_HELD = Path("/proc/self/statm")


class FreedMemory(Callback):
    """Returns free pages once the process holds 25 % more than usual after a step; does nothing on a GPU.

    The usual amount is the most that the process held after its first step, or after the step that followed a return.
    So a run whose steps come to need more memory returns pages once, and not after every step.
    """

    def __init__(self, run: Run) -> None:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
        self.trim = trim if run.device.type == "cpu" else None
        self.usual = 0  # bytes
        self.is_first = True  # whether the next step is the first since pages were returned

    def on_step(self, run: Run, finished: FinishedStep) -> None:
        if self.trim is None:
            return
        held = _held()
        if self.is_first:
            self.usual = max(self.usual, held)
        self.is_first = held > _GROWTH * self.usual
        if self.is_first:
            self.trim(0)


def _held() -> int:
    """Returns the resident memory of this process in bytes."""
    return int(_HELD.read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
