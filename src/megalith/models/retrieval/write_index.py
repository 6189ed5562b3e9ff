"""Writes an index of passages from a stream of embeddings, with the embeddings of one file in memory at a time."""

import hashlib
import json
import os
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from megalith.checkpoint.shard_file import write_shard
from megalith.errors import ConfigError, DataError, ShapeError
from megalith.models.retrieval.passage_index import (
    DTYPES,
    EMBEDDINGS,
    INDEX_FILE,
    OFFSETS,
    OFFSETS_FILE,
    TEXTS,
    Passage,
    PassageIndex,
    index_file_of,
    shard_file,
)
from megalith.storage import FileRecord, LocalStore, explained, new_folder

__all__ = ["check_index_dtype", "write_index"]

_SHARD_BYTES = 1 << 27  # of embeddings in a file
_MOST_PASSAGES = 1 << 32  # the search keeps an id in 32 bits


def check_index_dtype(dtype: str) -> None:
    """Raises ConfigError unless an index can store embeddings in ``dtype``, torch's name."""
    if dtype not in DTYPES:
        raise ConfigError(f"an index stores embeddings in {' or '.join(DTYPES)}; got {dtype!r:.40}; use float16")


def write_index(
    out: str | Path, batches: Iterable[tuple[Tensor, Sequence[Passage]]], *, dtype: str, model: Mapping[str, Any]
) -> PassageIndex:
    """Writes the folder ``out``, which appears once it is complete, and returns the index in it.

    Args:
        batches: embeddings [n, D] of n passages, and these. Nothing is taken from it if ``out`` exists.
        dtype: of the stored embeddings.
        model: describes what computed the embeddings; JSON.

    Raises:
        ConfigError: as ``check_index_dtype``, or an embedding is not finite in ``dtype``.
        DataError: there are no passages, or too many.
        ShapeError: the embeddings have another shape.
        StorageError: ``out`` exists, or cannot be written.
    """
    check_index_dtype(dtype)
    with new_folder(Path(out)) as folder:
        shards = _Shards(LocalStore(folder), getattr(torch, dtype))
        with explained("write", folder / TEXTS), (folder / TEXTS).open("wb") as file:
            texts = _Texts(file)
            for embeddings, passages in batches:
                if embeddings.dim() != 2 or len(embeddings) != len(passages):
                    raise ShapeError(
                        f"embeddings must be [n, D] of n passages; got {list(embeddings.shape)} of {len(passages)}"
                    )
                shards.add(embeddings)
                texts.add(passages)
            record = texts.finish()
        index = shards.finish(model)
        offsets = {OFFSETS: torch.frombuffer(texts.offsets, dtype=torch.int64)}
        files = {**index.files, TEXTS: record, OFFSETS_FILE: write_shard(index.store, OFFSETS_FILE, offsets)}
        index = replace(index, files=files)
        index.store.write(INDEX_FILE, [index_file_of(index)])
    return replace(index, store=LocalStore(Path(out)))


class _Shards:
    """Writes embeddings to files of equal size, each as soon as it is full."""

    def __init__(self, store: LocalStore, dtype: torch.dtype) -> None:
        self._store, self._dtype = store, dtype
        self._rows = torch.empty(0)  # [rows_per_shard, D] from the first embedding on
        self._num_filled = 0
        self._num_passages = 0
        self._files: dict[str, FileRecord] = {}

    def add(self, embeddings: Tensor) -> None:
        """Adds embeddings [n, D]."""
        D = embeddings.shape[1]
        if not self._num_passages:
            self._rows = torch.empty(max(1, _SHARD_BYTES // max(1, D * self._dtype.itemsize)), D, dtype=self._dtype)
        if self._rows.shape[1] != D:
            raise ShapeError(f"all embeddings must have the same size; got {D} after {self._rows.shape[1]}")
        if self._num_passages + len(embeddings) > _MOST_PASSAGES:
            raise DataError(f"an index must have at most {_MOST_PASSAGES:,} passages; make several indexes")
        stored = embeddings.detach().cpu().to(self._dtype)
        if not stored.isfinite().all():
            number = self._num_passages + int((~stored.isfinite()).any(dim=1).nonzero()[0])
            largest = embeddings.abs().max().item()
            way_out = "store them in float32" if embeddings.isfinite().all() else "check the model"
            raise ConfigError(
                f"embeddings must be finite in {str(self._dtype).removeprefix('torch.')}; that of passage {number} is "
                f"not (the largest value here is {largest:g}); {way_out}"
            )
        for rows in stored.split(len(self._rows)):
            room = len(self._rows) - self._num_filled
            for part in (rows[:room], rows[room:]):
                self._rows[self._num_filled : self._num_filled + len(part)] = part
                self._num_filled += len(part)
                self._num_passages += len(part)
                if self._num_filled == len(self._rows):
                    self._flush()

    def finish(self, model: Mapping[str, Any]) -> PassageIndex:
        """Writes the last file. Returns the index without its texts."""
        if not self._num_passages:
            raise DataError("an index must have at least one passage; the files have no text")
        if self._num_filled:
            self._flush()
        rows_per_shard, D = self._rows.shape
        dtype = str(self._dtype).removeprefix("torch.")
        return PassageIndex(self._store, self._num_passages, D, dtype, rows_per_shard, model, self._files)

    def _flush(self) -> None:
        name = shard_file(len(self._files))
        self._files[name] = write_shard(self._store, name, {EMBEDDINGS: self._rows[: self._num_filled]})
        self._num_filled = 0


class _Texts:
    """Writes passages to the lines of ``file``; ``offsets``: where each begins, and the end."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._sha256 = file, hashlib.sha256()
        self.offsets = array("q", [0])

    def add(self, passages: Sequence[Passage]) -> None:
        """Writes one line for each of ``passages``."""
        for passage in passages:
            line = (json.dumps(asdict(passage), ensure_ascii=False) + "\n").encode()
            self._file.write(line)
            self._sha256.update(line)
            self.offsets.append(self.offsets[-1] + len(line))

    def finish(self) -> FileRecord:
        """Makes the file durable and returns its record."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return FileRecord(self.offsets[-1], self._sha256.hexdigest())
