"""Allows one run per folder: a second one would mix its checkpoints and metrics with those of the first."""

import errno
import fcntl
import json
import logging
import os
import socket
from pathlib import Path
from types import TracebackType

from megalith.errors import StorageError
from megalith.storage.failures import explained

__all__ = ["RunLock"]

log = logging.getLogger(__name__)

# errors of file systems mounted without locks (Lustre without -o flock, some NFS)
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class RunLock:
    """Holds ``run_folder`` (created if absent) for this process, from construction until ``release`` or process exit.

    The kernel drops the lock when the process ends, even by kill -9, so there are no stale locks. A child forked while
    it is held shares the lock and keeps it for as long as the child lives.

    Raises:
        StorageError: another process holds the folder (the message names it), or the folder cannot be written.
    """

    def __init__(self, run_folder: Path) -> None:
        path = run_folder / ".lock"
        with explained("lock", path):
            run_folder.mkdir(parents=True, exist_ok=True)
            # a raw descriptor: the lock must not be dropped when an object is garbage-collected
            self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self._lock(run_folder, self._descriptor)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Releases the folder; a second call does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    @staticmethod
    def _lock(run_folder: Path, descriptor: int) -> None:
        with explained("lock", run_folder / ".lock"):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.pread(descriptor, 4096, 0).decode(errors="replace").strip() or "a process that just started"
                raise StorageError(
                    f"{run_folder} is in use by another run: {holder}; wait for it, stop it, "
                    "or choose another folder (run=... or --out)"
                ) from error
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                log.warning("the file system of %s has no locks: a second run there would not be detected", run_folder)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
