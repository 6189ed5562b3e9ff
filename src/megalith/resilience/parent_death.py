"""Ends a process with its parent even if it runs no Python: when stopped, or in a call that never returns."""

import ctypes
import os
import signal
import sys

__all__ = ["end_with_parent"]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(parent: int) -> None:
    """Has the kernel kill this process when ``parent``, the process that forked it, ends; on Linux only.

    The kernel considers the thread that forked to be the parent, so that thread must stay alive.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has already ended
        os._exit(1)
