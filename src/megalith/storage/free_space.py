"""Checks free disk space before it is needed."""

import shutil
from pathlib import Path

from megalith.errors import StorageError
from megalith.storage.failures import explained

__all__ = ["free_bytes", "require_free_bytes"]


def free_bytes(folder: Path) -> int:
    """Returns the bytes that this user may still write below ``folder``, which need not exist yet."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    with explained("query the free space of", existing):
        return shutil.disk_usage(existing).free


def require_free_bytes(folder: Path, num_bytes: int) -> None:
    """Raises StorageError unless ``num_bytes`` fit below ``folder``."""
    free = free_bytes(folder)
    if free < num_bytes:
        raise StorageError(
            f"{folder} needs {_readable(num_bytes)}, but its disk has only {_readable(free)} left; "
            "free up space there, or choose a folder on another disk"
        )


def _readable(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e7 else f"{num_bytes / 1e3:.1f} kB"
