"""Where checkpoints and datasets lie: files by name, and folders that appear with all their files or not at all.

A folder is published in three steps. One process calls ``stage``; every process writes its files into ``staged``; one
calls ``commit``, which puts the manifest last. Until then ``abandon`` drops all of it; ``leftovers`` are the folders
that killed processes have neither committed nor abandoned.

A new kind of store implements the abstract methods, and gets a line in the table of ``open_store.py``. The rest is
written here for stores that cannot rename: files go where they will stay, a hidden mark beside the folder says that it
is not committed, and a folder without a manifest counts for nothing. A store that can do better overrides it.
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
_PART = 8 << 20  # bytes in memory at once


class Store(ABC):
    """A folder. ``store / name`` is the folder, or names the file, inside; ``str(store)`` is its path or URL.

    A store holds no open files, so it may be copied, pickled and used by several threads.

    Every method raises StorageError if the store does not answer or refuses, MissingFileError if there is no such file.
    """

    @abstractmethod
    def __str__(self) -> str: ...

    @abstractmethod
    def __truediv__(self, name: str) -> "Store": ...

    @abstractmethod
    def split(self) -> tuple["Store", str]:
        """The folder that holds this one, and its name there."""

    @abstractmethod
    def names(self) -> list[str]:
        """The files and folders directly inside; none if this folder does not exist."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Bytes of the file ``name``."""

    @abstractmethod
    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fills ``buffer``, of bytes, with the content of the file ``name`` from byte ``start`` on."""

    @abstractmethod
    def write(self, name: str, parts: Iterable[Buffer]) -> None:
        """Makes the file ``name`` of ``parts`` end to end, each taken once, when the one before is written; durable on
        return.

        A process killed during the call may leave a partial file.
        """

    @abstractmethod
    def remove(self, name: str) -> None:
        """Removes the file ``name``; it is no error if there is none."""

    def put(self, name: str, content: bytes) -> None:
        """Makes or replaces the file ``name``: whoever reads it gets the old content or all of the new one."""
        self.write(name, [content])

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes ``start`` to ``stop`` (None: the end) of the file ``name``."""
        content = bytearray((self.size(name) if stop is None else stop) - start)
        self.read_into(name, start, memoryview(content))
        return bytes(content)

    def parts(self, name: str) -> Iterator[memoryview]:
        """The content of the file ``name`` in parts, from its first byte to its last; the next overwrites each."""
        num_bytes = self.size(name)
        buffer = memoryview(bytearray(min(num_bytes, _PART)))
        for start in range(0, num_bytes, _PART):
            part = buffer[: num_bytes - start]
            self.read_into(name, start, part)
            yield part

    def map(self, name: str) -> Buffer | None:
        """The file ``name`` as memory that is read when it is touched; None where only ``read_into`` can read."""
        return None

    def rename(self, name: str, to: str) -> None:
        """Moves the folder ``name`` to ``to``, which is free; killed half way, one of the two is complete."""
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
        """Removes the folder ``name``. If interrupted, the rest counts as incomplete and ``leftovers`` lists it."""
        folder = self / name
        self.put(hidden(name), b"")
        for file in sorted(folder.names(), key=lambda file: file != MANIFEST):
            folder.remove(file)
        self.remove(hidden(name))

    def stage(self, name: str, num_bytes: int) -> None:
        """Makes ready for the files of the folder ``name``, which does not exist; ``num_bytes`` or more will come."""
        self.put(hidden(name), b"")

    def staged(self, name: str) -> "Store":
        """The folder that the files of ``name`` are written into, between ``stage`` and ``commit``."""
        return self / name

    def commit(self, name: str, manifest: bytes) -> None:
        """Publishes the folder ``name``: all that is staged, and ``manifest`` last."""
        (self / name).put(MANIFEST, manifest)
        self.remove(hidden(name))

    def abandon(self, name: str) -> None:
        """Drops what is staged of ``name``; after ``commit`` there is nothing to drop."""
        if hidden(name) in self.names():
            if MANIFEST in (self / name).names():
                self.remove(hidden(name))
            else:
                self.remove_folder(name)

    def leftovers(self) -> list[str]:
        """Names of folders that killed processes left staged; ``abandon`` removes them."""
        return [match[1] for file in self.names() if (match := _HIDDEN.fullmatch(file))]


def hidden(name: str) -> str:
    """The name beside the folder ``name`` that says it is staged or on its way out."""
    return f".{name}.tmp"
