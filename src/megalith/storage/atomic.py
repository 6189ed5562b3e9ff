"""Files and folders that appear whole or not at all, whatever instant the process or the machine dies at.

Write beside the target under a hidden name, fsync, rename, fsync the folder that holds the name: rename is atomic, and
without the second fsync a power cut may forget it.
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
    """A temporary path to write; at the end it replaces ``path``, or, after an error, vanishes and ``path`` stays.

    Raises:
        StorageError: the finished file cannot be moved into place.
    """
    # a name of its own: two processes that publish one path must not write into one file
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
    """Moves the folder ``temporary``, whose files are fsynced already, to ``path``, which must not exist.

    Raises:
        StorageError: it cannot be moved; ``temporary`` stays where it is.
    """
    with explained("write", path):
        fsync_folder(temporary)
        os.rename(temporary, path)
        fsync_folder(path.parent)


def write_text_atomic(path: Path, text: str) -> None:
    """Replaces ``path`` by ``text`` in UTF-8. Raises StorageError, and leaves what was there."""
    with explained("write", path), publish_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json_atomic(path: Path, value: Any) -> None:
    """Replaces ``path`` by ``value`` as indented JSON. Raises StorageError, and leaves what was there."""
    write_text_atomic(path, json.dumps(value, indent=1) + "\n")


def fsync_folder(path: Path) -> None:
    """Makes the names in the folder ``path`` outlive a power cut."""
    _fsync(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
