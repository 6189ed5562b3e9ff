"""The process that ranks are forked from, as ``multiprocessing`` starts it: imports once, and forks on request.

It is not addressed by anybody, yet a signal to a whole process group (a scheduler's, ``timeout``'s, that of a terminal
which closes) would end it, and the ranks would be lost with it. So it leaves the group for a session of its own, and
what asks a program to end stays blocked in it, though not in what it forks. It ends with the program, whatever becomes
of the ranks.

Importing this module in the server does that, because modules to import are all that ``multiprocessing`` lets its
server be given; anywhere else it does nothing.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker

from megalith.resilience.parent_death import end_with_parent
from megalith.resilience.stop_signals import REQUESTS

__all__ = ["end_with_server", "ensure_running"]

_PROGRAM = "MEGALITH_PROGRAM"  # in the server's environment: the process that it serves
_SERVER = os.getpid()


def ensure_running(modules: list[str]) -> None:
    """Starts the server of this process, which imports ``modules``, unless it runs."""
    forkserver.set_forkserver_preload([__name__, *modules])
    os.environ[_PROGRAM] = str(os.getpid())
    try:
        # a child inherits what is blocked, so there is no instant at which a signal would end the server; the tracker
        # of resources comes first because starting it unblocks some of them again
        with _blocked():
            resource_tracker.ensure_running()
        with _blocked():
            forkserver.ensure_running()
    finally:
        del os.environ[_PROGRAM]  # other children are no servers


def end_with_server() -> None:
    """Has a rank end where the server does."""
    if os.getpid() != _SERVER:  # it was forked, and not started anew as on macOS
        end_with_parent(_SERVER)


def _hear() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)


@contextmanager
def _blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


if os.environ.get(_PROGRAM) == str(os.getppid()):
    os.setsid()
    os.register_at_fork(after_in_child=_hear)
    end_with_parent(os.getppid())
