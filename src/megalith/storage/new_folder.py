"""A folder of arbitrary files that is created completely or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megalith.errors import StorageError
from megalith.storage.atomic import publish_folder
from megalith.storage.failures import explained
from megalith.storage.run_lock import RunLock
from megalith.storage.store import hidden

__all__ = ["new_folder"]

_LOCK = ".lock"


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yields a hidden folder beside ``path``, to be filled with durable files; it becomes ``path`` at the end.

    After an error it is removed. What a killed process left behind is removed by the next one that creates ``path``.

    Raises:
        StorageError: ``path`` exists, another process is creating it, or it cannot be written.
    """
    path = Path(os.path.abspath(path))
    with explained("write", path):
        exists = os.path.lexists(path)
    if exists:
        raise StorageError(f"{path} already exists and will not be overwritten; choose another folder")
    temporary = path.with_name(hidden(path.name))
    with explained("write", temporary):
        if temporary.is_symlink() or (temporary.is_dir() and not _is_left_over(temporary)):
            raise StorageError(
                f"{temporary}, needed to create {path}, exists and was not left by a killed run; move it away"
            )
    with RunLock(temporary):
        try:
            with explained("write", temporary):
                for left in temporary.iterdir():
                    if left.name != _LOCK:
                        shutil.rmtree(left) if left.is_dir() else left.unlink()
            yield temporary
            publish_folder(temporary, path)
            with explained("write", path):
                (path / _LOCK).unlink()  # not earlier: another process would take the folder for a leftover
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def _is_left_over(folder: Path) -> bool:
    """Returns whether the process that created ``folder`` was killed: the folder is empty or has its lock file."""
    return (folder / _LOCK).is_file() or not any(folder.iterdir())
