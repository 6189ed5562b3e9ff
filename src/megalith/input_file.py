"""Checks user-supplied paths and files before opening them.

Opening a FIFO blocks until there is a writer, /dev/zero never ends, and a wrong path may lead to a file larger than
memory.
"""

import errno
import os
import stat
from pathlib import Path

__all__ = ["home_expanded", "read_regular_file", "regular_file_size"]

_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}


def home_expanded(path: str) -> str:
    """Returns ``path`` with a leading ``~`` or ``~user`` replaced by that home folder, as a shell does without quotes.

    Raises:
        ValueError: there is no such user.
    """
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        user = path.partition("/")[0]
        raise ValueError(f"must begin with a home folder that exists, and none does for {user}; use ./{user} instead")
    return expanded


def regular_file_size(path: str | Path) -> int:
    """Returns the size in bytes of the regular file ``path``, following links, without opening it.

    Raises:
        OSError: it does not exist, is something else such as a folder or a FIFO, or no file can have such a name.
    """
    try:
        status = Path(path).stat()
    except ValueError as error:  # a NUL character, or half of a surrogate pair
        raise OSError(errno.EINVAL, f"not a valid file name: {error}") from error
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file")
    return status.st_size


def read_regular_file(path: str | Path, most_bytes: int) -> bytes:
    """Returns the content of the regular file ``path``. Raises OSError as ``regular_file_size``, or if too large."""
    size = regular_file_size(path)
    if size > most_bytes:
        raise OSError(errno.EFBIG, f"it has {size:,} bytes; the limit is {most_bytes:,}")
    with open(path, "rb") as file:
        return file.read(most_bytes)
