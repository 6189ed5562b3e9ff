"""``manifest.json``: name, size and SHA-256 of every file of a folder, written last; required for completeness.

The manifest also holds the digest of its own table, which distinguishes damage to it from damage to a listed file.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial

from megalith.errors import CheckpointError, MissingFileError
from megalith.storage.store import MANIFEST, Buffer, Store
from megalith.storage.worker import Worker

__all__ = ["FileRecord", "Recorder", "has_all_files", "manifest_of", "read_manifest", "record_of"]

_FORMAT = "megalith checkpoint"
_VERSION = 1
_BLOCK, _SMALL = 32 << 20, 1 << 20  # bytes
_MOST_BYTES = 1 << 26  # about 150 per listed file


@dataclass(frozen=True)
class FileRecord:
    """The expected size of a file in bytes, and the SHA-256 of its content in hexadecimal."""

    bytes: int
    sha256: str


class Recorder:
    """Iterates over ``parts``, in blocks, and hashes them; ``record()`` returns size and SHA-256 of what was consumed.

    A large block is hashed in a thread while the consumer writes it.
    """

    def __init__(self, parts: Iterable[Buffer]) -> None:
        self._parts = parts
        self._sha256 = hashlib.sha256()
        self._num_bytes = 0

    def __iter__(self) -> Iterator[Buffer]:
        with Worker() as hasher:
            for part in self._parts:
                for start in range(0, len(part), _BLOCK):
                    with memoryview(part)[start : start + _BLOCK] as block:
                        self._num_bytes += len(block)
                        if len(block) < _SMALL:
                            self._sha256.update(block)
                        else:
                            hasher.submit(partial(self._sha256.update, block))
                        try:
                            yield block
                        finally:  # also if the consumer has failed
                            hasher.wait()  # the block may now be overwritten or freed

    def record(self) -> FileRecord:
        """Returns size and SHA-256 of all parts consumed so far."""
        return FileRecord(self._num_bytes, self._sha256.hexdigest())


def record_of(parts: Iterable[Buffer]) -> FileRecord:
    """Returns the record of a file whose content is the concatenation of ``parts``."""
    recorder = Recorder(parts)
    for _ in recorder:
        pass
    return recorder.record()


def manifest_of(files: Mapping[str, FileRecord]) -> bytes:
    """Returns the manifest of a folder of ``files``."""
    table = {name: asdict(files[name]) for name in sorted(files)}
    content = {"format": _FORMAT, "version": _VERSION, "sha256": _digest(table), "files": table}
    return (json.dumps(content, indent=1) + "\n").encode()


def read_manifest(store: Store) -> dict[str, FileRecord]:
    """Returns the records in the manifest of the folder ``store``, by file name.

    Raises:
        CheckpointError: there is no manifest, it is damaged, or it has a format that this version does not read.
        StorageError: the store cannot read it.
    """
    path = store / MANIFEST
    try:
        if (num_bytes := store.size(MANIFEST)) > _MOST_BYTES:
            raise CheckpointError(
                f"{path} is damaged: it has {num_bytes:,} bytes, more than the limit of {_MOST_BYTES:,}"
            )
        content = json.loads(store.read(MANIFEST))
        found = (content["format"], content["version"])
        table, sha256 = content["files"], content["sha256"]
    except MissingFileError as error:
        raise CheckpointError(f"{store} is not a complete checkpoint: it has no {MANIFEST}") from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
    if found != (_FORMAT, _VERSION):
        raise _OtherFormatError(
            f"{path} must have format {(_FORMAT, _VERSION)}; got {found}; use the Megalith version that wrote it"
        )
    if sha256 != _digest(table):
        raise CheckpointError(f"{path} is damaged: the SHA-256 that it states does not match its table")
    try:
        return {name: _record(name, **entry) for name, entry in table.items()}
    except (AttributeError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error


def has_all_files(store: Store) -> bool:
    """Returns whether the folder has a valid manifest and every listed file in the listed size. Reads no other file.

    Raises:
        CheckpointError: the manifest has a format that this version does not read.
        StorageError: the store cannot tell. In both cases the folder may be complete, and must not be skipped.
    """
    try:
        return all(store.size(name) == record.bytes for name, record in read_manifest(store).items())
    except _OtherFormatError:
        raise
    except (CheckpointError, MissingFileError):
        return False


class _OtherFormatError(CheckpointError):
    """Written by another version, which does not mean that it is damaged."""


def _record(name: str, bytes: int, sha256: str) -> FileRecord:
    if (
        not name
        or name in (".", "..")
        or "/" in name
        or "\0" in name
        or type(bytes) is not int
        or type(sha256) is not str
    ):
        raise TypeError(f"{name!r} must be a file directly in the folder, with its size and SHA-256")
    return FileRecord(bytes, sha256)


def _digest(table: object) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
