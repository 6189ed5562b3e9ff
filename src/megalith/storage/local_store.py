"""The store on a file system: staged folders are hidden, and a single rename publishes them."""

import mmap
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megalith.errors import StorageError
from megalith.input_file import regular_file_size
from megalith.storage.atomic import fsync_folder, publish_file, publish_folder
from megalith.storage.failures import explained
from megalith.storage.free_space import require_free_bytes
from megalith.storage.store import MANIFEST, Buffer, Store, hidden
from megalith.storage.worker import Worker

__all__ = ["LocalStore"]

_FLUSHED = 32 << 20  # bytes of a file that are sent to the disk while more are written
_flush = getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync
_PART = 1 << 18  # bytes; small enough to stay in a core's cache while it is hashed


@dataclass(frozen=True)
class LocalStore(Store):
    """The folder ``path``, which need not exist yet. All processes that use it must share its file system."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def __truediv__(self, name: str) -> "LocalStore":
        return LocalStore(self.path / name)

    def split(self) -> tuple["LocalStore", str]:
        # the last part of "." or of "a/.." does not name the folder
        path = Path(os.path.abspath(self.path)) if self.path.name in ("", "..") else self.path
        return LocalStore(path.parent), path.name

    def names(self) -> list[str]:
        with explained("read", self.path):
            try:
                return sorted(os.listdir(self.path))
            except FileNotFoundError:
                return []

    def size(self, name: str) -> int:
        path = self.path / name
        with explained("read", path):
            return regular_file_size(path)

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        path = self.path / name
        with explained("read", path):
            regular_file_size(path)  # raises for a FIFO, which open would block on
            descriptor = os.open(path, os.O_RDONLY)
            try:
                done = 0
                while done < len(buffer):
                    num_bytes = os.preadv(descriptor, [buffer[done:]], start + done)
                    if num_bytes == 0:
                        raise StorageError(f"cannot read {path}: it ends before byte {start + len(buffer)}")
                    done += num_bytes
            finally:
                os.close(descriptor)

    def parts(self, name: str) -> Iterator[memoryview]:
        path = self.path / name
        buffer = memoryview(bytearray(_PART))
        with explained("read", path):
            regular_file_size(path)
            with path.open("rb", buffering=0) as file:
                while num_bytes := file.readinto(buffer):
                    yield buffer[:num_bytes]

    def map(self, name: str) -> mmap.mmap | bytes:
        path = self.path / name
        with explained("read", path):
            if not regular_file_size(path):
                return b""  # an empty file cannot be mapped
            with path.open("rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def write(self, name: str, parts: Iterable[Buffer]) -> None:
        path = self.path / name
        with explained("write", path), path.open("wb") as file, Worker() as flusher:
            num_unflushed = 0
            for part in parts:
                file.write(part)
                num_unflushed += len(part)
                if num_unflushed >= _FLUSHED and flusher.is_idle():  # else the disk would idle until all is written
                    flusher.submit(partial(_flush, file.fileno()))
                    num_unflushed = 0
            file.flush()
            flusher.wait()
            os.fsync(file.fileno())

    def remove(self, name: str) -> None:
        path = self.path / name
        with explained("remove", path):
            path.unlink(missing_ok=True)

    def put(self, name: str, content: bytes) -> None:
        path = self.path / name
        with explained("write", path), publish_file(path) as temporary:
            temporary.write_bytes(content)

    def rename(self, name: str, to: str) -> None:
        path = self.path / name
        with explained("rename", path):
            os.rename(path, self.path / to)
            fsync_folder(self.path)

    def remove_folder(self, name: str) -> None:
        # renamed first: if killed half way, it is a leftover and not a partial folder
        doomed = self.path / hidden(name)
        with explained("remove", self.path / name):
            os.rename(self.path / name, doomed)
            shutil.rmtree(doomed)

    def stage(self, name: str, num_bytes: int) -> None:
        path = self.path / hidden(name)
        with explained("write", path):
            self.path.mkdir(parents=True, exist_ok=True)
            fsync_folder(self.path.parent)
            require_free_bytes(self.path, num_bytes)
            path.mkdir()

    def staged(self, name: str) -> "LocalStore":
        return self / hidden(name)

    def commit(self, name: str, manifest: bytes) -> None:
        staged = self.staged(name)
        staged.put(MANIFEST, manifest)
        publish_folder(staged.path, self.path / name)

    def abandon(self, name: str) -> None:
        path = self.path / hidden(name)
        with explained("remove", path):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
