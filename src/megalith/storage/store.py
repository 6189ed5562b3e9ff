"""The store interface: files by name, and folders that appear with all their files or not at all.

A folder is published in three steps. One process calls ``stage``; every process writes its files into ``staged``; one
process calls ``commit``, which writes the manifest last. Until then ``abandon`` discards everything. ``leftovers``
lists the folders that killed processes neither committed nor abandoned.

A new kind of store implements the abstract methods, and gets a line in the table of ``open_store.py``. The other
methods have defaults for stores that cannot rename: files are written to their final place, a hidden marker beside the
folder says that it is not committed, and a folder without a manifest does not count. Stores that can do better override
them.
"""

import mmap
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

from megalith.errors import MissingFileError

__all__ = ["MANIFEST", "Buffer", "Store", "hidden"]

Buffer = bytes | bytearray | memoryview | mmap.mmap

MANIFEST = "manifest.json"
_HIDDEN = re.compile(r"\.(.+)\.tmp")
_PART = 8 << 20  # bytes in memory at a time


class Store(ABC):
    """A folder. ``store / name`` is a folder or the name of a file inside it; ``str(store)`` is its path or URL.

    A store holds no open files, so it may be copied, pickled and used by several threads.

    Every method raises StorageError if the store fails or refuses, and MissingFileError if there is no such file.
    """

    @abstractmethod
    def __str__(self) -> str: ...

    @abstractmethod
    def __truediv__(self, name: str) -> "Store": ...

    @abstractmethod
    def split(self) -> tuple["Store", str]:
        """Returns the parent folder, and this folder's name in it."""

    @abstractmethod
    def names(self) -> list[str]:
        """Returns the names of files and folders directly inside; empty if this folder does not exist."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Returns the size of the file ``name`` in bytes."""

    @abstractmethod
    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fills the byte ``buffer`` with the content of the file ``name`` from byte ``start`` on."""

    @abstractmethod
    def write(self, name: str, parts: Iterable[Buffer]) -> None:
        """Writes the concatenation of ``parts`` to the file ``name``, durable on return.

        Consumes each part once, after the previous one is written. A process killed during the call may leave a partial
        file.
        """

    @abstractmethod
    def remove(self, name: str) -> None:
        """Removes the file ``name``, if it exists."""

    def put(self, name: str, content: bytes) -> None:
        """Creates or replaces the file ``name`` atomically: readers see either the old content or all of the new."""
        self.write(name, [content])

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Returns bytes ``start`` to ``stop`` (None: the end) of the file ``name``."""
        content = bytearray((self.size(name) if stop is None else stop) - start)
        self.read_into(name, start, memoryview(content))
        return bytes(content)

    def parts(self, name: str) -> Iterator[memoryview]:
        """Yields the content of the file ``name`` in parts, first to last; each part overwrites the previous one."""
        num_bytes = self.size(name)
        buffer = memoryview(bytearray(min(num_bytes, _PART)))
        for start in range(0, num_bytes, _PART):
            part = buffer[: num_bytes - start]
            self.read_into(name, start, part)
            yield part

    def map(self, name: str) -> Buffer | None:
        """Returns the file ``name`` as memory that is read on access; None if only ``read_into`` is supported."""
        return None

    def rename(self, name: str, to: str) -> None:
        """Renames the folder ``name`` to ``to``, which must not exist; if interrupted, one of the two is complete."""
        source, target = self / name, self / to
        names = source.names()
        if not names:
            raise MissingFileError(f"cannot rename {source}: there is no such folder; check the path")
        self.put(hidden(to), b"")
        for file in sorted(names, key=lambda file: file == MANIFEST):
            target.write(file, source.parts(file))
        self.remove(hidden(to))
        self.remove_folder(name)

    def remove_folder(self, name: str) -> None:
        """Removes the folder ``name``. If interrupted, the rest counts as incomplete, and ``leftovers`` lists it."""
        folder = self / name
        self.put(hidden(name), b"")
        for file in sorted(folder.names(), key=lambda file: file != MANIFEST):
            folder.remove(file)
        self.remove(hidden(name))

    def stage(self, name: str, num_bytes: int) -> None:
        """Prepares the folder ``name``, which must not exist, for at least ``num_bytes`` of files."""
        self.put(hidden(name), b"")

    def staged(self, name: str) -> "Store":
        """Returns the folder to write the files of ``name`` into, between ``stage`` and ``commit``."""
        return self / name

    def commit(self, name: str, manifest: bytes) -> None:
        """Publishes the folder ``name``: everything staged, and ``manifest`` last."""
        (self / name).put(MANIFEST, manifest)
        self.remove(hidden(name))

    def abandon(self, name: str) -> None:
        """Discards what is staged of ``name``; does nothing after ``commit``."""
        if hidden(name) in self.names():
            if MANIFEST in (self / name).names():
                self.remove(hidden(name))
            else:
                self.remove_folder(name)

    def leftovers(self) -> list[str]:
        """Returns the names of folders that killed processes left staged; ``abandon`` removes them."""
        return [match[1] for file in self.names() if (match := _HIDDEN.fullmatch(file))]


def hidden(name: str) -> str:
    """Returns the name beside the folder ``name`` that marks it as staged or being removed."""
    return f".{name}.tmp"
