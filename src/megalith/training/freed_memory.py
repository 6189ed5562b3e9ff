"""Gives freed memory back to the system, on a CPU.

glibc keeps what is freed for the next allocation, but tensors of many sizes, of which some live on, leave it in pieces
that none fits into: a run over sharded weights grows by megabytes a step, and never shrinks. Giving back the whole free
pages costs some tenths of a second, and the next step the time to get them again, so it is done when there are many.
"""

import ctypes
import os
import sys
from pathlib import Path

from megalith.training.loop import Callback, FinishedStep
from megalith.training.run import Run

__all__ = ["FreedMemory"]

_GROWTH = 1.25  # of what is held after a step, before free pages are given back
_HELD = Path("/proc/self/statm")


class FreedMemory(Callback):
    """Gives free pages back once the process holds a quarter more than it usually does after a step; nothing on a GPU.

    What is usual is the most that it held after its first step, or after the step that followed a return: a run whose
    steps came to need more gives pages back once, and not after each of them.
    """

    def __init__(self, run: Run) -> None:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
        self.trim = trim if run.device.type == "cpu" else None
        self.usual = 0  # bytes
        self.is_first = True  # of the steps since pages were given back

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
    """Bytes of this process that are in memory."""
    return int(_HELD.read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
