"""A store in memory, as a user would write one: only the abstract methods."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist

from megalith.errors import MissingFileError
from megalith.storage import Buffer, Store


class Bytes(Protocol):
    """Where a MemoryStore keeps its files: bytes by full name."""

    def __iter__(self) -> Iterator[str]: ...
    def get(self, key: str) -> bytes | None: ...
    def set(self, key: str, content: bytes) -> None: ...
    def delete(self, key: str) -> None: ...


class OwnBytes(dict[str, bytes]):
    """The memory of this process."""

    def set(self, key: str, content: bytes) -> None:
        self[key] = content

    def delete(self, key: str) -> None:
        self.pop(key, None)


class SharedBytes:
    """Bytes that all ranks see: the key-value store of the default process group, under ``prefix``."""

    def __init__(self, prefix: str) -> None:
        self.store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())

    def __iter__(self) -> Iterator[str]:
        written = {self.store.get(f"name {i}").decode() for i in range(self.store.add("count", 0))}
        return (key for key in written if self.get(key) is not None)

    def get(self, key: str) -> bytes | None:
        # torch's key-value stores wait for missing keys, and not all of them can delete one
        found = self.store.get(f"file {key}") if self.store.check([f"file {key}"]) else b"-"
        return found[1:] if found[:1] == b"+" else None

    def set(self, key: str, content: bytes) -> None:
        self.store.set(f"file {key}", b"+" + content)
        self.store.set(f"name {self.store.add('count', 1) - 1}", key)

    def delete(self, key: str) -> None:
        self.store.set(f"file {key}", b"-")


@dataclass(frozen=True)
class MemoryStore(Store):
    """The files of ``held`` whose names begin with ``folder``."""

    held: Bytes
    folder: str = "memory://"

    def __str__(self) -> str:
        return self.folder

    def __truediv__(self, name: str) -> "MemoryStore":
        return MemoryStore(self.held, f"{self.folder}/{name}")

    def split(self) -> tuple["MemoryStore", str]:
        folder, _, name = self.folder.rpartition("/")
        return MemoryStore(self.held, folder), name

    def names(self) -> list[str]:
        start = f"{self.folder}/"
        return sorted({key.removeprefix(start).partition("/")[0] for key in self.held if key.startswith(start)})

    def size(self, name: str) -> int:
        return len(self._content(name))

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        buffer[:] = self._content(name)[start : start + len(buffer)]

    def write(self, name: str, parts: Iterable[Buffer]) -> None:
        self.held.set(f"{self.folder}/{name}", b"".join(bytes(part) for part in parts))

    def remove(self, name: str) -> None:
        self.held.delete(f"{self.folder}/{name}")

    def _content(self, name: str) -> bytes:
        content = self.held.get(f"{self.folder}/{name}")
        if content is None:
            raise MissingFileError(f"{self.folder}/{name} is not there")
        return content
