"""Turns an OSError about a file into a StorageError that suggests a fix."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megalith.errors import MissingFileError, StorageError

__all__ = ["explained"]

_ROOM = "free up space there, or choose a folder on another disk"
_RIGHTS = "change the permissions, or choose a folder that this user can access"
_WRITABLE = "choose a folder on a file system that can be written to"
_TAKEN = "move what is already there, or choose another folder"
_WAYS_OUT = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: "raise the file size limit (ulimit -f), or choose a folder on another disk",
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EROFS: _WRITABLE,
    errno.ENOENT: "check the path; with several machines the folder must be on a file system that all of them share",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "check where the symbolic links point",
    errno.EISDIR: "expected a file but found a folder: check the path",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.EINVAL: "check the path",
    errno.ENOTDIR: "expected a folder but found a file: choose another folder",
    errno.EEXIST: _TAKEN,
    errno.ENOTEMPTY: _TAKEN,
}


@contextmanager
def explained(action: str, path: Path) -> Iterator[None]:
    """Converts any OSError in the block into StorageError: ``cannot {action} {path}``, the reason and how to fix it.

    The error is a MissingFileError if the file or folder does not exist.
    """
    if "\0" in str(path):
        raise StorageError(f"cannot {action} {str(path)!r}: a path cannot contain a NUL character; check the path")
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        way_out = _WAYS_OUT.get(error.errno or 0, "check the disk and its file system")
        kind = MissingFileError if isinstance(error, FileNotFoundError | NotADirectoryError) else StorageError
        raise kind(f"cannot {action} {path}: {error.strerror or error}; {way_out}") from error
