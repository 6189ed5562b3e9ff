"""Reads and writes ``PREFIX.idx``, with checks that detect a damaged file before any token is read.

    little endian, packed:  "MMIDIDX\\0\\0" | uint64 version = 1 | uint8 dtype code | uint64 S | uint64 N + 1
                            int32 length of each sequence in tokens        [S]
                            int64 byte offset of each sequence in .bin     [S]
                            int64 first sequence of each document, then S  [N + 1]

S sequences in N documents; a document has zero or more sequences (one for GPT). The format is Megatron's.
"""

import errno
import os
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalith.errors import DataError, StorageError
from megalith.storage import Buffer, Store

__all__ = ["DTYPES", "Index", "companion", "read_index", "readable", "write_index"]

DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}

_MAGIC = b"MMIDIDX\0\0"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, number of sequences, number of document indices
_CHUNK = 1 << 20  # entries in memory at once
_WAY_OUT = "copy the files again, or recreate them with: megalith data prepare"


@dataclass(frozen=True)
class Index:
    """The content of an .idx file, as views. S sequences, N documents."""

    dtype: np.dtype[Any]
    lengths: NDArray[np.int32]  # [S], tokens
    offsets: NDArray[np.int64]  # [S], bytes
    document_indices: NDArray[np.int64]  # [N + 1]
    num_bytes: int  # of .bin


def companion(prefix: Path, suffix: str) -> Path:
    """Appends ``suffix`` to ``prefix``; Path.with_suffix would truncate a prefix that contains dots."""
    return prefix.with_name(prefix.name + suffix)


@contextmanager
def readable(store: Store, name: str) -> Iterator[None]:
    """Context in which a StorageError for a .bin or .idx file becomes a DataError that says how to fix it."""
    try:
        yield
    except StorageError as error:
        stem = name.rpartition(".")[0]
        suffixed = stem.endswith((".bin", ".idx"))
        way_out = f"leave out the {stem[-4:]}" if suffixed else "check the path"
        if getattr(error.__cause__, "errno", None) == errno.EMFILE:
            way_out = "raise the limit on open files (ulimit -n)"
        reason = getattr(error.__cause__, "strerror", None) or error
        raise DataError(
            f"{store / name} cannot be read ({reason}); a dataset is given as the PREFIX of PREFIX.bin and PREFIX.idx: "
            f"{way_out}"
        ) from error


def read_index(store: Store, name: str) -> Index:
    """Reads and checks the file ``name``. Raises DataError if it is missing, damaged, or in another format."""
    path = str(store / name)
    with readable(store, name):
        content = store.map(name)
        if content is None:
            content = store.read(name)
    dtype, num_sequences, num_indices = _parse_header(path, content)
    at_lengths, at_offsets, at_documents = (_HEADER.size + n for n in (0, 4 * num_sequences, 12 * num_sequences))
    lengths = np.frombuffer(content, "<i4", num_sequences, at_lengths)
    offsets = np.frombuffer(content, "<i8", num_sequences, at_offsets)
    documents = np.frombuffer(content, "<i8", num_indices, at_documents)
    num_bytes = _check_sequences(path, lengths, offsets, dtype.itemsize)
    _check_documents(path, documents, num_sequences)
    return Index(dtype, lengths, offsets, documents, num_bytes)


def write_index(path: Path, dtype: np.dtype[Any], lengths: Path, document_ends: Path) -> None:
    """Writes and fsyncs ``path`` from two files of raw numbers, in constant memory.

    Args:
        lengths: int32 ``[S]``, tokens of each sequence.
        document_ends: int64 ``[N]``, index after the last sequence of each document.
    """
    code = next(code for code, known in DTYPES.items() if known == dtype)
    num_sequences, num_documents = lengths.stat().st_size // 4, document_ends.stat().st_size // 8
    with path.open("wb") as index:
        index.write(_HEADER.pack(_MAGIC, _VERSION, code, num_sequences, num_documents + 1))
        with lengths.open("rb") as file:
            shutil.copyfileobj(file, index)
        with lengths.open("rb") as file:
            end = 0
            while (part := np.frombuffer(file.read(4 * _CHUNK), "<i4")).size:
                ends = end + dtype.itemsize * np.cumsum(part, dtype="<i8")
                index.write(np.append(end, ends[:-1]).astype("<i8").tobytes())
                end = int(ends[-1])
        index.write(bytes(8))
        with document_ends.open("rb") as file:
            shutil.copyfileobj(file, index)
        index.flush()
        os.fsync(index.fileno())


def _parse_header(path: str, content: Buffer) -> tuple[np.dtype[Any], int, int]:
    """dtype, number of sequences, number of document indices."""
    if len(content) < _HEADER.size:
        raise DataError(f"{path} must begin with a header of {_HEADER.size} bytes; it has {len(content)}; {_WAY_OUT}")
    magic, version, code, num_sequences, num_indices = _HEADER.unpack_from(content)
    if magic != _MAGIC:
        raise DataError(f"{path} must begin with {_MAGIC!r}; it begins with {magic!r}: it is not a dataset index")
    if version != _VERSION:
        raise DataError(f"{path} must have version {_VERSION}; it has version {version}; {_WAY_OUT}")
    if code not in DTYPES:
        codes = ", ".join(f"{known} {dtype.name}" for known, dtype in DTYPES.items())
        raise DataError(f"{path} must have one of the dtype codes {codes}; it has {code}; {_WAY_OUT}")
    wanted = _HEADER.size + 12 * num_sequences + 8 * num_indices
    if num_sequences and len(content) == wanted + num_sequences:
        raise DataError(f"{path} has a mode for each sequence, as in a multimodal dataset; use a text dataset")
    if len(content) != wanted:
        raise DataError(
            f"{path} must have {wanted} bytes for {num_sequences} sequences and {num_indices} document indices; "
            f"it has {len(content)}; {_WAY_OUT}"
        )
    return DTYPES[code], num_sequences, num_indices


def _check_sequences(path: str, lengths: NDArray[np.int32], offsets: NDArray[np.int64], itemsize: int) -> int:
    """Checks that each sequence begins where the previous one ends; returns the bytes of all sequences."""
    end = 0
    for start in range(0, len(lengths), _CHUNK):
        part = lengths[start : start + _CHUNK].astype(np.int64)
        begins = end + itemsize * np.append(0, np.cumsum(part))
        wrong = np.flatnonzero((part < 0) | (offsets[start : start + _CHUNK] != begins[:-1]))
        if wrong.size:
            first = start + int(wrong[0])
            raise DataError(
                f"{path} is damaged: sequence {first} should begin at byte {begins[wrong[0]]} and have a length of at "
                f"least 0; it begins at {offsets[first]} and has length {lengths[first]}; {_WAY_OUT}"
            )
        end = int(begins[-1])
    return end


def _check_documents(path: str, indices: NDArray[np.int64], num_sequences: int) -> None:
    if not indices.size or indices[0] != 0 or indices[-1] != num_sequences or np.any(indices[1:] < indices[:-1]):
        raise DataError(
            f"{path} is damaged: its document indices should rise from 0 to {num_sequences}, the number of sequences; "
            f"they are {np.array2string(indices, threshold=8)}; {_WAY_OUT}"
        )
