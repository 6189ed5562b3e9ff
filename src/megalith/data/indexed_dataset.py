"""Megatron's indexed datasets: ``PREFIX.bin`` holds all tokens, ``PREFIX.idx`` where each sequence begins.

Reads and writes files that are compatible with Megatron; ``index_file.py`` describes the layout. ``PREFIX.json``
(``sidecar.py``) is specific to Megalith.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from megalith.data.index_file import DTYPES, companion, read_index, readable, write_index
from megalith.data.sidecar import Sidecar
from megalith.errors import DataError
from megalith.storage import Store, explained, fsync_folder, open_store

__all__ = ["IndexedDataset", "IndexedDatasetBuilder", "Tokens", "best_dtype", "files_of", "remove_dataset"]

_COPIED = 1 << 18  # tokens in memory at once
_MAX_SEQUENCE_LENGTH = 2**31 - 1  # tokens; lengths are int32 on disk


def best_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype for token ids below ``vocab_size``, as Megatron chooses it: uint16 if they fit, else int32."""
    return DTYPES[8] if vocab_size < 65500 else DTYPES[4]


def files_of(prefix: Path) -> list[Path]:
    """The files of a dataset in the order in which they are published: if the last one exists, all do."""
    return [companion(prefix, suffix) for suffix in (".bin", ".json", ".idx")]


def remove_dataset(prefix: Path) -> None:
    """Deletes the files of a dataset that exist, the .idx first, so that no reader takes the rest for complete."""
    for path in reversed(files_of(prefix)):
        path.unlink(missing_ok=True)


class Tokens(Protocol):
    """All tokens of a dataset in file order, ``[num_tokens]``; slicing returns a read-only array."""

    def __len__(self) -> int: ...

    def __getitem__(self, tokens: slice, /) -> NDArray[Any]: ...


class IndexedDataset:
    """The sequences of ``prefix.bin``, read on access. Pickles as its prefix.

    Args:
        prefix: path, URL, or store location (``store / "corpus"``) of the two files, without ``.bin`` and ``.idx``.

    Attributes:
        dtype: dtype of the tokens on disk.
        tokens: all tokens: a view of the memory-mapped file, or an object that reads each slice from the store.
        sequence_lengths: int32 ``[S]``, in tokens.
        document_indices: int64 ``[N + 1]``; document d is sequences ``document_indices[d]`` to ``[d + 1]``.
        sidecar: what the files were made from; None for files that were not made by Megalith.

    Raises:
        DataError: a file is missing, damaged, in another format, or does not belong to the other files.
    """

    def __init__(self, prefix: str | Path | Store) -> None:
        self.prefix = prefix
        store, name = open_store(prefix).split()
        index_name, bin_name = f"{name}.idx", f"{name}.bin"
        index = read_index(store, index_name)
        self.dtype = index.dtype
        self.sequence_lengths = index.lengths
        self.document_indices = index.document_indices
        self._offsets = index.offsets
        with readable(store, bin_name):
            num_bytes = store.size(bin_name)
            content = store.map(bin_name)
        if num_bytes != index.num_bytes:
            raise DataError(
                f"{store / bin_name} must have {index.num_bytes} bytes, as recorded in {index_name}; it has "
                f"{num_bytes}: one of the two files is truncated or belongs to another dataset; copy or recreate both"
            )
        self.tokens: Tokens
        if content is None:
            self.tokens = _StoredTokens(store, bin_name, self.dtype, num_bytes // self.dtype.itemsize)
        else:
            self.tokens = np.frombuffer(content, self.dtype)
        self.sidecar = self._read_sidecar(store, f"{name}.json")

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __reduce__(self) -> tuple[type["IndexedDataset"], tuple[str | Path | Store]]:
        return IndexedDataset, (self.prefix,)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        return len(self.document_indices) - 1

    def require_token_ids(self) -> None:
        """Raises DataError if the dtype is floating point: such data are features, not token ids."""
        if self.dtype.kind == "f":
            raise DataError(
                f"{self.prefix} must contain integer token ids; its .idx says {self.dtype.name}; use a text dataset, "
                "or create one with: megalith data prepare"
            )

    def document_starts(self) -> NDArray[np.int64]:
        """int64 ``[N + 1]``: document d is ``tokens[starts[d]:starts[d + 1]]``."""
        return self.sequence_starts()[self.document_indices]

    def sequence_starts(self) -> NDArray[np.int64]:
        """int64 ``[S + 1]``: sequence s is ``tokens[starts[s]:starts[s + 1]]``."""
        return np.append(self._offsets // self.dtype.itemsize, self.num_tokens)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Returns ``length`` tokens of sequence ``index`` from ``offset`` on (None: to its end), as a read-only view.

        Raises IndexError if the range is outside the sequence.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"{self.prefix} has sequences 0 to {len(self) - 1}; got {index}")
        available = int(self.sequence_lengths[index])
        stop = available if length is None else offset + length
        if not 0 <= offset <= stop <= available:
            raise IndexError(
                f"sequence {index} of {self.prefix} has {available} tokens; got the range {offset} to {stop}"
            )
        start = int(self._offsets[index]) // self.dtype.itemsize
        return self.tokens[start + offset : start + stop]

    def _read_sidecar(self, store: Store, name: str) -> Sidecar | None:
        sidecar = Sidecar.read(store, name)
        if sidecar is not None:
            described = (sidecar.num_documents, sidecar.num_sequences, sidecar.num_tokens)
            found = (self.num_documents, len(self), self.num_tokens)
            if described != found:
                raise DataError(
                    f"{store / name} must describe the .bin and .idx beside it, which have {found} documents, "
                    f"sequences and tokens; it describes {described} of other files; copy or recreate all three"
                )
        return sidecar


@dataclass(frozen=True)
class _StoredTokens:
    """Tokens in a store that cannot be memory-mapped: each slice is one read."""

    store: Store
    name: str
    dtype: np.dtype[Any]
    num_tokens: int

    def __len__(self) -> int:
        return self.num_tokens

    def __getitem__(self, tokens: slice, /) -> NDArray[Any]:
        start, stop, step = tokens.indices(self.num_tokens)
        assert step == 1, "only contiguous tokens can be read"
        found = np.empty(max(0, stop - start), self.dtype)
        with readable(self.store, self.name):
            self.store.read_into(self.name, start * self.dtype.itemsize, found.view(np.uint8).data)
        found.flags.writeable = False
        return found


class IndexedDatasetBuilder:
    """Writes ``prefix.bin``, ``.json`` and ``.idx`` in constant memory.

    Everything is written to a scratch folder, and ``finalize`` moves the files into place, the ``.idx`` last: if the
    ``.idx`` exists, the other two are complete. Without ``finalize`` no file appears.

        with IndexedDatasetBuilder(prefix, best_dtype(vocab_size)) as builder:
            for tokens in documents:
                builder.add_document(tokens)
            builder.finalize()

    Args:
        prefix: path of the files without their suffixes; its folder is created if it does not exist.
        dtype: dtype of the tokens on disk, one of the eight that Megatron supports.
        scratch: a folder on the same disk for unfinished files; by default the folder of ``prefix``.

    Raises:
        DataError: one of the files exists already, or the dtype is not supported.
        StorageError: here and in every method, the disk is full or not writable.
    """

    def __init__(self, prefix: str | Path, dtype: DTypeLike, *, scratch: Path | None = None) -> None:
        self.prefix = Path(prefix)
        self.dtype = np.dtype(dtype)
        if self.dtype not in DTYPES.values():
            names = ", ".join(known.name for known in DTYPES.values())
            raise DataError(f"tokens can be stored as {names}; got {self.dtype.name}")
        if present := [path.name for path in files_of(self.prefix) if path.exists()]:
            raise DataError(
                f"{self.prefix.parent} already contains {', '.join(present)}; choose another name, or move them away"
            )
        with explained("write", self.prefix):
            self.prefix.parent.mkdir(parents=True, exist_ok=True)
            self._scratch = Path(tempfile.mkdtemp(prefix=f".{self.prefix.name}.", dir=scratch or self.prefix.parent))
            self._bin, self._lengths, self._document_ends = (
                (self._scratch / name).open("wb") for name in ("bin", "lengths", "document_ends")
            )
        self._open_tokens = 0  # in the current sequence
        self._document_tokens = 0
        self.num_tokens = 0
        self.num_sequences = 0
        self.num_documents = 0
        self.num_empty_documents = 0
        self._token_ids: tuple[int, int] | None = None  # smallest and largest so far

    def write(self, tokens: ArrayLike) -> None:
        """Appends ``tokens`` [T] to the current sequence, and starts a new one where it exceeds the format's maximum.

        Raises DataError for a token that does not fit in the dtype on disk.
        """
        given = np.asarray(tokens)
        stored = given.astype(self.dtype)
        if not np.array_equal(stored, given):
            raise DataError(
                f"tokens must fit in {self.dtype.name}; got {given.min()} to {given.max()}; use a wider dtype, such as "
                "best_dtype(vocab_size)"
            )
        self._note_token_ids(stored)
        while stored.size:
            room = _MAX_SEQUENCE_LENGTH - self._open_tokens
            with explained("write", companion(self.prefix, ".bin")):
                self._bin.write(stored[:room].tobytes())
            self._open_tokens += len(stored[:room])
            stored = stored[room:]
            if stored.size:
                self.end_sequence()

    def end_sequence(self) -> None:
        """Ends the current sequence, which may be empty."""
        with explained("write", companion(self.prefix, ".idx")):
            self._lengths.write(self._open_tokens.to_bytes(4, "little"))
        self.num_sequences += 1
        self.num_tokens += self._open_tokens
        self._document_tokens += self._open_tokens
        self._open_tokens = 0

    def end_document(self) -> None:
        """Ends the document, and its current sequence unless that is empty."""
        if self._open_tokens:
            self.end_sequence()
        with explained("write", companion(self.prefix, ".idx")):
            self._document_ends.write(self.num_sequences.to_bytes(8, "little"))
        self.num_documents += 1
        self.num_empty_documents += not self._document_tokens
        self._document_tokens = 0

    def add_document(self, tokens: ArrayLike, sequence_lengths: Sequence[int] | None = None) -> None:
        """Appends ``tokens`` [T] as one document of sequences of these lengths; by default one (none if T = 0)."""
        given = np.asarray(tokens)
        if sequence_lengths is None:
            self.write(given)
        else:
            if min(sequence_lengths, default=0) < 0 or sum(sequence_lengths) != len(given):
                raise DataError(
                    f"sequence lengths must be >= 0 and add up to {len(given)} tokens; got {list(sequence_lengths)}"
                )
            start = 0
            for length in sequence_lengths:
                self.write(given[start : start + length])
                self.end_sequence()
                start += length
        self.end_document()

    def add_dataset(self, dataset: IndexedDataset) -> None:
        """Appends the documents of ``dataset``. Raises DataError if its dtype differs."""
        starts, num_before = dataset.document_starts(), self.num_sequences
        self.add_sequences(dataset)
        with explained("write", self.prefix):
            self._document_ends.write((dataset.document_indices[1:] + num_before).astype("<i8").tobytes())
        self._document_tokens = 0
        self.num_documents += dataset.num_documents
        self.num_empty_documents += int(np.count_nonzero(np.diff(starts) == 0))

    def add_sequences(self, dataset: IndexedDataset) -> None:
        """Appends all sequences of ``dataset`` to the current document. Raises DataError if its dtype differs."""
        assert not self._open_tokens, "end the open sequence first"
        if dataset.dtype != self.dtype:
            raise DataError(
                f"{dataset.prefix} has dtype {dataset.dtype.name}; it must be {self.dtype.name} to be appended"
            )
        with explained("write", self.prefix):
            for start in range(0, dataset.num_tokens, _COPIED):
                tokens = dataset.tokens[start : start + _COPIED]
                self._note_token_ids(tokens)
                self._bin.write(tokens.tobytes())
            self._lengths.write(dataset.sequence_lengths.tobytes())
        self.num_tokens += dataset.num_tokens
        self._document_tokens += dataset.num_tokens
        self.num_sequences += len(dataset)

    def finalize(self, **origin: Any) -> Sidecar:
        """Publishes the files and returns the content of ``prefix.json``; ``origin`` are fields of ``Sidecar``."""
        assert not self._open_tokens, "end the open document first"
        smallest, largest = self._token_ids or (None, None)
        sidecar = Sidecar(
            num_documents=self.num_documents,
            num_sequences=self.num_sequences,
            num_tokens=self.num_tokens,
            bin_bytes=self.num_tokens * self.dtype.itemsize,
            num_empty_documents=self.num_empty_documents,
            min_token_id=smallest,
            max_token_id=largest,
            **origin,
        )
        with explained("write", self.prefix):
            self._bin.flush()
            os.fsync(self._bin.fileno())
            for file in (self._bin, self._lengths, self._document_ends):
                file.close()
            write_index(self._scratch / "idx", self.dtype, self._scratch / "lengths", self._scratch / "document_ends")
            sidecar.write(self._scratch / "json")
            for path in files_of(self.prefix):
                os.replace(self._scratch / path.suffix[1:], path)
            fsync_folder(self.prefix.parent)
        self.abandon()
        return sidecar

    def abandon(self) -> None:
        """Removes files that were not published."""
        for file in (self._bin, self._lengths, self._document_ends):
            with contextlib.suppress(OSError):  # closing flushes the buffer, which fails again on a full disk
                file.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _note_token_ids(self, tokens: NDArray[Any]) -> None:
        if tokens.size and self.dtype.kind != "f":
            smallest, largest = int(tokens.min()), int(tokens.max())
            before = self._token_ids or (smallest, largest)
            self._token_ids = min(smallest, before[0]), max(largest, before[1])

    def __enter__(self) -> "IndexedDatasetBuilder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()
