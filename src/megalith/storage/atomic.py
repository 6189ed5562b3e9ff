"""Atomic files and folders: they appear completely or not at all, even if the process or the machine crashes.

Write under a hidden name beside the target, fsync, rename, and fsync the parent folder: rename is atomic, but without
the second fsync it may be lost in a power failure.
"""

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megalith.storage.failures import explained

__all__ = ["fsync_folder", "publish_file", "publish_folder", "write_json_atomic", "write_text_atomic"]


@contextmanager
def publish_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write to, which replaces ``path`` at the end of the block.

    After an error the temporary file is removed, and ``path`` is unchanged.

    Raises:
        StorageError: the finished file cannot be moved into place.
    """
    # a unique name: two processes that publish the same path must not write to the same file
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        with explained("write", path):
            _fsync(temporary)
            os.replace(temporary, path)
            fsync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def publish_folder(temporary: Path, path: Path) -> None:
    """Moves the folder ``temporary``, whose files are already fsynced, to ``path``, which must not exist.

    Raises:
        StorageError: it cannot be moved; ``temporary`` stays in place.
    """
    with explained("write", path):
        fsync_folder(temporary)
        os.rename(temporary, path)
        fsync_folder(path.parent)


def write_text_atomic(path: Path, text: str) -> None:
    """Replaces ``path`` by ``text`` in UTF-8. Raises StorageError, and then leaves ``path`` unchanged."""
    with explained("write", path), publish_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json_atomic(path: Path, value: Any) -> None:
    """Replaces ``path`` by ``value`` as indented JSON. Raises StorageError, and then leaves ``path`` unchanged."""
    write_text_atomic(path, json.dumps(value, indent=1) + "\n")


def fsync_folder(path: Path) -> None:
    """Makes the entries of the folder ``path`` survive a power failure."""
    _fsync(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
