"""The server that ranks are forked from, started by ``multiprocessing``: imports once, and forks on request.

Nobody addresses it directly, yet a signal to a whole process group (from a scheduler, ``timeout``, or a closing
terminal) would end it, and the ranks would be lost. It therefore moves to a session of its own, and blocks the signals
that ask a program to end, though not in the processes it forks. It ends with the program, whatever happens to the
ranks.

Importing this module in the server sets that up, because ``multiprocessing`` lets a caller configure its server only by
modules to import; anywhere else the import does nothing.
"""

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker

from megalith.resilience.parent_death import end_with_parent
from megalith.resilience.stop_signals import REQUESTS

__all__ = ["end_with_server", "ensure_running"]

_PROGRAM = "MEGALITH_PROGRAM"  # environment variable of the server: pid of the process that it serves
_SERVER = os.getpid()


def ensure_running(modules: list[str]) -> None:
    """Starts this process's server, which imports ``modules``, unless it is already running."""
    forkserver.set_forkserver_preload([__name__, *modules])
    os.environ[_PROGRAM] = str(os.getpid())
    try:
        # a child inherits blocked signals, so at no time can a signal end the server; the resource tracker comes
        # first, because starting it unblocks some of them again
        with _blocked():
            resource_tracker.ensure_running()
        with _blocked():
            forkserver.ensure_running()
    finally:
        del os.environ[_PROGRAM]  # other children are not servers


def end_with_server() -> None:
    """Makes a rank end when the server does."""
    if os.getpid() != _SERVER:  # forked, not spawned as on macOS
        end_with_parent(_SERVER)


def _begin() -> None:
    """Undoes in a forked process what is set in the server; what the server has imported is no garbage."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)
    if os.getppid() == _SERVER:
        gc.freeze()
        gc.enable()


@contextmanager
def _blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


if (_program := os.environ.pop(_PROGRAM, None)) is not None:  # popped: what the server starts is not a server
    if os.getppid() != int(_program):
        os._exit(1)  # the program has ended already, and nothing else would end this before torch is imported
    os.setsid()
    os.register_at_fork(after_in_child=_begin)
    end_with_parent(os.getppid())
    gc.disable()  # what it imports stays
