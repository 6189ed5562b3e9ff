"""Passages and their embeddings in a folder, which is read in parts.

    passage_index.json             N, D, the dtype, the model, and size and SHA-256 of each of the files below
    embeddings-00000.safetensors   "embeddings" [n, D] of the first n passages; more files follow
    passages.jsonl                 {"text", "source", "document"} of each passage, in order
    offsets.safetensors            "offsets" int64 [N+1]: where each line of passages.jsonl begins, and its end

A passage's id is its place in this order, from 0. The first file also holds the digest of its own table.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.checkpoint.box import Box
from megalith.checkpoint.shard_file import ShardFile
from megalith.errors import CheckpointError, DataError, MissingFileError
from megalith.storage import FileRecord, Store, open_store, record_of

__all__ = [
    "DTYPES",
    "EMBEDDINGS",
    "INDEX_FILE",
    "OFFSETS",
    "OFFSETS_FILE",
    "TEXTS",
    "Passage",
    "PassageIndex",
    "index_file_of",
    "shard_file",
]

INDEX_FILE = "passage_index.json"
TEXTS, OFFSETS_FILE = "passages.jsonl", "offsets.safetensors"
EMBEDDINGS, OFFSETS = "embeddings", "offsets"  # keys
DTYPES = ("float16", "float32")
_FORMAT, _VERSION = "megalith passage index", 1
_MOST_BYTES = 1 << 26  # of INDEX_FILE, which has about 150 per listed file
_AGAIN = "copy it again from its source, or make it again with: megalith data index"


@dataclass(frozen=True)
class Passage:
    """A text that can be found; ``source`` names the file that it is from, and ``document`` its place there, from 0."""

    text: str
    source: str
    document: int


@dataclass(frozen=True)
class PassageIndex:
    """The index in the folder ``store``.

    Attributes:
        num_passages: N.
        embedding_size: D.
        dtype: of the stored embeddings, torch's name.
        rows_per_shard: the number of embeddings in every file but the last.
        model: what the embeddings were computed with, as given to ``write_index``.
        files: all other files of the folder, by name.
    """

    store: Store
    num_passages: int
    embedding_size: int
    dtype: str
    rows_per_shard: int
    model: Mapping[str, Any]
    files: Mapping[str, FileRecord]

    @classmethod
    def open(cls, location: str | Path | Store) -> "PassageIndex":
        """Opens the index at ``location`` and checks the size of each file, but not what they contain.

        Raises:
            DataError: there is no index, another version wrote it, or it is damaged.
            StorageError: it cannot be read.
        """
        store = open_store(location)
        index = cls(store, **_read_table(store))
        for name, record in index.files.items():
            try:
                num_bytes = store.size(name)
            except MissingFileError as error:
                raise DataError(f"{store} is damaged: it has no {name}; {_AGAIN}") from error
            if num_bytes != record.bytes:
                raise DataError(
                    f"{store / name} is damaged: it must have {record.bytes:,} bytes; it has {num_bytes:,}; {_AGAIN}"
                )
        return index

    def verify(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Reads every file. ``progress`` is called with the bytes done and the total.

        Raises DataError for one that does not have the content that was written.
        """
        total, done = sum(record.bytes for record in self.files.values()), 0
        progress(done, total)
        for name, record in self.files.items():
            if record_of(self.store.parts(name)) != record:
                raise DataError(f"{self.store / name} is damaged: its content is not what was written; {_AGAIN}")
            done += record.bytes
            progress(done, total)

    def blocks(self, num_rows: int, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        """Yields all embeddings as [n, D] in ``dtype``, with the id of the first of them; n is at most ``num_rows``.

        Each block overwrites the one before. Raises DataError for a file that is damaged, StorageError for one that
        cannot be read.
        """
        D, buffer = self.embedding_size, torch.empty(0)
        for number, first in enumerate(range(0, self.num_passages, self.rows_per_shard)):
            n = min(self.rows_per_shard, self.num_passages - first)
            whole = Box.whole((n, D))
            for start in range(0, n, num_rows):
                size = min(num_rows, n - start)
                if len(buffer) < size:
                    buffer = torch.empty(size, D, dtype=dtype)
                part = Box(((start, start + size), (0, D)))
                self._read(shard_file(number), EMBEDDINGS, whole, part, self.dtype, buffer[:size])
                yield first + start, buffer[:size]

    def passages(self, ids: Sequence[int]) -> list[Passage]:
        """Returns the passages with these ``ids``. Raises as ``blocks``, and IndexError for an id that none has."""
        found = []
        for id in ids:
            if not 0 <= id < self.num_passages:
                raise IndexError(f"passages are numbered 0 to {self.num_passages - 1}; got {id}")
            bounds = torch.empty(2, dtype=torch.int64)
            part = Box(((id, id + 2),))
            self._read(OFFSETS_FILE, OFFSETS, Box.whole((self.num_passages + 1,)), part, "int64", bounds)
            start, stop = bounds.tolist()
            if not 0 <= start < stop <= self.files[TEXTS].bytes:
                raise DataError(f"{self.store / OFFSETS_FILE} is damaged: passage {id} has no text; {_AGAIN}")
            try:
                fields = json.loads(self.store.read(TEXTS, start, stop))
                found.append(Passage(str(fields["text"]), str(fields["source"]), int(fields["document"])))
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                raise DataError(f"{self.store / TEXTS} is damaged: passage {id}: {error!r}; {_AGAIN}") from error
        return found

    def _read(self, name: str, key: str, whole: Box, part: Box, dtype: str, into: Tensor) -> None:
        try:
            ShardFile(self.store, name).read_part(key, whole, part, dtype, into)
        except CheckpointError as error:
            raise DataError(f"{self.store / name} is damaged: {error}; {_AGAIN}") from error


def shard_file(number: int) -> str:
    """The name of the file of embeddings with this number, from 0."""
    return f"embeddings-{number:05}.safetensors"


def index_file_of(index: PassageIndex) -> bytes:
    """Returns the content of ``INDEX_FILE``."""
    table = {
        "num_passages": index.num_passages,
        "embedding_size": index.embedding_size,
        "dtype": index.dtype,
        "rows_per_shard": index.rows_per_shard,
        "model": dict(index.model),
        "files": {name: asdict(record) for name, record in index.files.items()},
    }
    content = {"format": _FORMAT, "version": _VERSION, "sha256": _digest(table), "index": table}
    return (json.dumps(content, indent=1) + "\n").encode()


def _read_table(store: Store) -> dict[str, Any]:
    """The attributes of the index in ``store``. Raises DataError."""
    path = store / INDEX_FILE
    try:
        if (num_bytes := store.size(INDEX_FILE)) > _MOST_BYTES:
            raise DataError(f"{path} is damaged: it has {num_bytes:,} bytes, more than {_MOST_BYTES:,}; {_AGAIN}")
        content = json.loads(store.read(INDEX_FILE))
        found = content["format"], content["version"]
    except MissingFileError as error:
        raise DataError(
            f"{store} must be an index of passages; it has no {INDEX_FILE}; make one with: megalith data index RUN "
            "FILES... --out INDEX"
        ) from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error!r}; {_AGAIN}") from error
    if found != (_FORMAT, _VERSION):
        raise DataError(
            f"{path} must have format {(_FORMAT, _VERSION)}; got {found!s:.80}; make the index again, or use the "
            "Megalith version that wrote it"
        )
    try:
        table = content["index"]
        if content["sha256"] != _digest(table):
            raise ValueError("the SHA-256 that it states does not match its table")
        return _checked(**table)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error}; {_AGAIN}") from error


def _checked(
    *, num_passages: int, embedding_size: int, dtype: str, rows_per_shard: int, model: Any, files: Any
) -> dict[str, Any]:
    """The attributes with these values. Raises ValueError or similar."""
    for count in (num_passages, embedding_size, rows_per_shard):
        if type(count) is not int or count < 1:
            raise ValueError(f"its counts must be positive integers; got {count!r:.80}")
    if dtype not in DTYPES or not isinstance(model, dict):
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, and model an object; got {(dtype, model)!r:.80}")
    records = {name: FileRecord(**record) for name, record in files.items()}
    for name, record in records.items():
        if type(record.bytes) is not int or type(record.sha256) is not str:
            raise ValueError(f"its files must have bytes, an integer, and sha256, text; {name:.80} has {record!r:.80}")
    shards = {shard_file(number) for number in range(min(len(records), -(-num_passages // rows_per_shard)))}
    if records.keys() != {TEXTS, OFFSETS_FILE, *shards}:
        raise ValueError(f"it must list one file for every {rows_per_shard:,} of {num_passages:,} passages")
    return {
        "num_passages": num_passages,
        "embedding_size": embedding_size,
        "dtype": dtype,
        "rows_per_shard": rows_per_shard,
        "model": model,
        "files": records,
    }


def _digest(table: object) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()
