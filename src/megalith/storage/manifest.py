"""``manifest.json``: name, size and SHA-256 of every file of a folder, written last; without it nothing is complete.

The manifest also holds the digest of its own table, so that damage to it is told from damage to a file it lists.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from megalith.errors import CheckpointError
from megalith.storage.atomic import write_json_atomic
from megalith.storage.failures import explained

__all__ = ["MANIFEST", "FileRecord", "has_all_files", "read_manifest", "record_of", "write_manifest"]

MANIFEST = "manifest.json"
_FORMAT = "megalith checkpoint"
_VERSION = 1
_ABSENT = (FileNotFoundError, NotADirectoryError)


@dataclass(frozen=True)
class FileRecord:
    """What a file must be: its size in bytes and the SHA-256 of its content in hexadecimal."""

    bytes: int
    sha256: str


def record_of(path: Path) -> FileRecord:
    """The record of the file ``path`` as it is on disk now."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return FileRecord(os.fstat(file.fileno()).st_size, sha256)


def write_manifest(folder: Path, files: Mapping[str, FileRecord]) -> None:
    """Writes the manifest of ``folder``. Raises StorageError."""
    table = {name: asdict(files[name]) for name in sorted(files)}
    content = {"format": _FORMAT, "version": _VERSION, "sha256": _digest(table), "files": table}
    write_json_atomic(folder / MANIFEST, content)


def read_manifest(folder: Path) -> dict[str, FileRecord]:
    """The records that the manifest of ``folder`` holds, by file name.

    Raises:
        CheckpointError: there is none, it is damaged, or it is of a format that this version does not read.
        StorageError: the disk does not let it be read.
    """
    path = folder / MANIFEST
    try:
        with explained("read", path):
            raw = _read_if_there(path)
        content = json.loads(raw)
        found = (content["format"], content["version"])
        table, sha256 = content["files"], content["sha256"]
    except CheckpointError:
        raise
    except (ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
    if found != (_FORMAT, _VERSION):
        raise _OtherFormatError(f"{path} must be of format {(_FORMAT, _VERSION)}; got {found}; use the Megalith of it")
    if sha256 != _digest(table):
        raise CheckpointError(f"{path} is damaged: its table does not have the SHA-256 that it states")
    try:
        return {name: _record(name, **entry) for name, entry in table.items()}
    except (AttributeError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error


def has_all_files(folder: Path) -> bool:
    """Whether ``folder`` has a sound manifest and every file that it lists, in the listed size. Reads no other file.

    Raises:
        CheckpointError: the manifest is of a format that this version does not read.
        StorageError: the disk does not tell. In both cases it may be whole, and must not be passed over.
    """
    with explained("read", folder):
        try:
            files = read_manifest(folder)
            return all((folder / name).stat().st_size == record.bytes for name, record in files.items())
        except _OtherFormatError:
            raise
        except (CheckpointError, *_ABSENT):
            return False


class _OtherFormatError(CheckpointError):
    """Written by another version, and not therefore damaged."""


def _read_if_there(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except _ABSENT as error:
        raise CheckpointError(f"{path.parent} is not a complete checkpoint: it has no {path.name}") from error


def _record(name: str, bytes: int, sha256: str) -> FileRecord:
    if Path(name).name != name or "\0" in name or type(bytes) is not int or type(sha256) is not str:
        raise TypeError(f"{name!r} must be a file of the folder itself, with its size and SHA-256")
    return FileRecord(bytes, sha256)


def _digest(table: object) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
