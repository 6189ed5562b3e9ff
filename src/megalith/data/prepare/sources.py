"""Finds the input files, and defines what a document is in each format.

.jsonl (.ndjson, .json), also .gz     every line is a document: the text under one key
.parquet                              every row is a document: the text in one column
any other file, also .gz              the file is one document
a folder                              every UTF-8 file below it is one document, except hidden and binary ones; also
                                      below links to folders, each folder once
"""

import codecs
import errno
import gzip
import os
import stat
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Literal, NoReturn, cast

from megalith.data.sidecar import SourceRecord
from megalith.errors import DataError

__all__ = ["Source", "Sources", "find_sources"]

Format = Literal["text", "jsonl", "parquet"]

_FORMATS: dict[str, Format] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
_OF_LINES = (".jsonl", ".ndjson")  # unlike .json, which is usually a single value
_UNREADABLE = {".zst", ".bz2", ".xz", ".lz4", ".zip", ".tar", ".tgz", ".7z"}
_LEADS_NOWHERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


@dataclass(frozen=True)
class Source:
    """An input file.

    ``name`` is the path relative to the parent folder of its input; it identifies the documents independently of where
    that folder is. ``occurrence`` numbers files of the same name from 0, in input order.
    """

    path: Path
    name: str
    input_name: str
    format: Format
    size: int  # bytes on disk
    modified: int  # nanoseconds
    is_compressed: bool
    held_out: bool  # the whole file belongs to the validation set
    occurrence: int = 0

    @property
    def key(self) -> str:
        """Unique key in the job: the name, followed by the occurrence unless that is 0."""
        return f"{self.name}\0{self.occurrence}" if self.occurrence else self.name

    def open(self) -> BinaryIO:
        """Opens the file for reading, decompressed. Raises DataError if it has changed since it was found."""
        self.check_unchanged()
        return cast(BinaryIO, gzip.open(self.path)) if self.is_compressed else self.path.open("rb")

    def check_unchanged(self) -> None:
        """Raises DataError if the file has changed since it was found."""
        try:
            status = self.path.stat()
        except OSError as error:
            raise DataError(f"{self.path} can no longer be read: {error.strerror}") from error
        if (status.st_size, status.st_mtime_ns) != (self.size, self.modified):
            raise DataError(f"{self.path} changed while it was being read; run the command again when it is complete")


@dataclass(frozen=True)
class Sources:
    """The files of a job, in order, and what was skipped in its folders.

    Attributes:
        num_skipped: binary files.
        num_broken_links: links that lead to nothing that exists.
        num_special: pipes, sockets and devices.
    """

    files: tuple[Source, ...]
    num_skipped: int
    num_broken_links: int = 0
    num_special: int = 0

    @property
    def num_lines_as_text(self) -> int:
        """Number of .jsonl files in folders, each of which is one document of plain text like any other file there."""
        return sum(s.format == "text" and s.path.suffix.lower() in _OF_LINES for s in self.files)

    def records(self, *, held_out: bool) -> tuple[SourceRecord, ...]:
        """One record per input of the validation set (``held_out``) or of the training set.

        If no file belongs to that set as a whole, every input contributes documents to it.
        """
        totals: dict[str, tuple[int, int]] = {}
        for source in [source for source in self.files if source.held_out == held_out] or self.files:
            count, size = totals.get(source.input_name, (0, 0))
            totals[source.input_name] = (count + 1, size + source.size)
        return tuple(
            SourceRecord(name=os.fsencode(name).decode(errors="replace"), num_files=count, bytes=size)
            for name, (count, size) in totals.items()
        )


def find_sources(
    inputs: Sequence[str | Path], held_out: Sequence[str | Path] = (), leave_out: Sequence[Path] = ()
) -> Sources:
    """Finds the files of ``inputs`` and then of ``held_out`` (files and folders); those of a folder sorted by path.

    Args:
        leave_out: absolute paths to exclude although they are inside an input folder.

    Raises:
        DataError: an input is missing, unreadable, in an unsupported format, or given twice, also through links.
    """
    found_by_input: list[list[Source]] = []
    num_skipped = num_broken_links = num_special = 0
    for given, is_held_out in [*((path, False) for path in inputs), *((path, True) for path in held_out)]:
        path = Path(os.path.abspath(given))
        if not os.path.isdir(path):  # unlike Path.is_dir, never raises
            found_by_input.append([_source(path, path.parent, path, is_held_out)])
            continue
        inside, num_broken, num_others = _walk(path, leave_out)
        candidates = [_source(file, path.parent, path, is_held_out) for file in inside]
        texts = [source for source in candidates if _is_text(source.path)]
        if not texts:
            raise DataError(
                f"{path} must contain UTF-8 text files; it has none (binary files: {len(candidates)}; hidden files "
                "are skipped)"
            )
        found_by_input.append(texts)
        num_skipped += len(candidates) - len(texts)
        num_broken_links += num_broken
        num_special += num_others
    _refuse_twice(found_by_input)
    num_named: Counter[str] = Counter()
    files: list[Source] = []
    for source in chain(*found_by_input):
        files.append(replace(source, occurrence=num_named[source.name]))
        num_named[source.name] += 1
    return Sources(tuple(files), num_skipped, num_broken_links, num_special)


def _refuse_twice(found_by_input: Sequence[Sequence[Source]]) -> None:
    """Raises DataError if several inputs lead to the same file."""
    seen: dict[str, Source] = {}
    for found in found_by_input:
        real = {os.path.realpath(source.path): source for source in found}
        for path, here in real.items():
            if (there := seen.get(path)) is None:
                continue
            harm = "count its text twice" if here.held_out == there.held_out else "train on text that is held out"
            if here.path == there.path:
                raise DataError(f"{here.path} is given twice, which would {harm}; give it once")
            raise DataError(
                f"{there.path} and {here.path} are the same file, which would {harm}; give one of them, or remove the "
                "link to it"
            )
        seen |= real


def _walk(folder: Path, leave_out: Sequence[Path]) -> tuple[list[Path], int, int]:
    """Returns the files in ``folder``, recursively and sorted, and the numbers of broken links and of special files.

    Hidden files and folders are not among them. Links to folders are followed; a folder that several paths lead to is
    read once, under the path without links if it has one.
    """
    files: list[Path] = []
    num_broken = num_special = 0
    visited: set[str] = set()
    excluded = {os.path.realpath(path) for path in leave_out}
    to_visit = [folder]  # and then links to folders, after all that is reached without them
    for top in to_visit:
        for root, folders, names in os.walk(top, onerror=_raise_unreadable):
            real_root = os.path.realpath(root)
            if real_root in visited:
                folders.clear()
                continue
            visited.add(real_root)
            shown = sorted(
                Path(root, name)
                for name in folders + names
                if not name.startswith(".") and os.path.join(real_root, name) not in excluded
            )
            folders.clear()
            for path in shown:
                mode = _mode(path)
                if mode is None:
                    num_broken += 1
                elif stat.S_ISREG(mode):
                    files.append(path)
                elif not stat.S_ISDIR(mode):
                    num_special += 1
                elif path.is_symlink():
                    to_visit.append(path)
                else:
                    folders.append(path.name)
    if files and all(_format(path) != "text" for path in files):
        raise DataError(
            f"every file in {folder} is .jsonl or .parquet, but each file in a folder is read as one document of plain "
            f"text; give the files themselves: {folder}/*{files[0].suffix}"
        )
    return sorted(files), num_broken, num_special


def _mode(path: Path) -> int | None:
    """Returns the mode of what ``path`` leads to, which tells its type, or None if there is nothing."""
    try:
        return os.stat(path).st_mode
    except OSError as error:
        if error.errno in _LEADS_NOWHERE:
            return None
        _raise_unreadable(error)


def _raise_unreadable(error: OSError) -> NoReturn:
    raise DataError(f"{error.filename} cannot be read: {error.strerror}; check its permissions") from error


def _source(path: Path, root: Path, given: Path, held_out: bool) -> Source:
    """The source for ``path``, which is the input ``given`` or inside it; ``root`` is the parent of ``given``."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check the path") from error
    except ValueError as error:
        raise DataError(f"{str(path)!r} is not a valid path: {error}; check it") from error
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path} must be a regular file or a folder; anything else cannot be read twice")
    if not os.access(path, os.R_OK):
        raise DataError(f"{path} cannot be read by this user; change its permissions")
    from_folder = path != given
    packed = _UNREADABLE & set(path.suffixes[-2:])
    if packed and not from_folder:
        raise DataError(
            f"{path} is packed as {min(packed)}, which is not supported; unpack it, or compress it with gzip"
        )
    return Source(
        path=path,
        name=path.relative_to(root).as_posix(),
        input_name=given.name,
        format="text" if from_folder else _format(path),
        size=status.st_size,
        modified=status.st_mtime_ns,
        is_compressed=path.suffix == ".gz" and not from_folder,
        held_out=held_out,
    )


def _format(path: Path) -> Format:
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix != ".gz"]
    format = _FORMATS.get(suffixes[-1], "text") if suffixes else "text"
    if format == "parquet" and path.suffix == ".gz":
        raise DataError(f"{path} is a .parquet file inside gzip; decompress it: parquet has its own compression")
    return format


def _is_text(path: Path) -> bool:
    """Whether the file is UTF-8 without NUL bytes, which indicate binary files and UTF-16."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                if b"\0" in block:
                    return False
                decoder.decode(block)
            decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True
