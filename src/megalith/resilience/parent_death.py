"""A process that ends with its parent even where it runs no Python: stopped, or in a call that never returns."""

import ctypes
import os
import signal
import sys

__all__ = ["end_with_parent"]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(parent: int) -> None:
    """Has the kernel kill this process when ``parent``, the process that forked it, has ended; on Linux only.

    To the kernel the parent is the thread that forked, so that must be one that stays.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before
        os._exit(1)
