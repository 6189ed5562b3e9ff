"""From files of texts to an index of passages, and from queries to the passages closest to them."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from megalith.data.prepare.documents import place_of, read_pieces, read_records
from megalith.data.prepare.sources import Source, Sources, find_sources
from megalith.errors import CheckpointError, ConfigError, DataError, StorageError
from megalith.models.retrieval.passage_index import Passage, PassageIndex
from megalith.models.retrieval.search import search
from megalith.models.retrieval.write_index import check_index_dtype, write_index
from megalith.storage import LocalStore
from megalith.training.tasks.text_embeddings import EmbeddingSource, TextEmbedder

__all__ = ["Hit", "IndexSummary", "index_passages", "read_queries", "search_passages"]

_LONGEST_TEXT = 1 << 20  # characters of a document that are kept
_TEXTS_AT_ONCE, _CHARACTERS_AT_ONCE = 2048, 1 << 22  # of texts that are packed together; more need less padding


@dataclass(frozen=True)
class IndexSummary:
    """What has been indexed.

    Attributes:
        num_cut: passages that were truncated to what the model reads at once, ``longest`` tokens.
        num_empty: documents without text, which are left out.
    """

    index: PassageIndex
    sources: Sources
    num_cut: int
    num_empty: int
    longest: int


class Hit(NamedTuple):
    """A passage that was found; ``score``: the inner product of its embedding with the query's."""

    id: int
    score: float
    passage: Passage


def index_passages(
    source: str | Path,
    files: Sequence[str | Path],
    out: str | Path,
    *,
    key: str = "text",
    dtype: str = "float16",
    batch_size: int | None = None,
    progress: Callable[[int, int, int], None] = lambda num_passages, done, total: None,
) -> IndexSummary:
    """Embeds every document of ``files`` with the model ``source``, in this process, and writes the index ``out``.

    Args:
        source: as in ``EmbeddingSource.open``.
        files: as in ``find_sources``; ``key`` is the field or column that holds the text.
        out: the folder, which appears once it is complete.
        dtype: as in ``write_index``.
        batch_size: as in ``TextEmbedder.embed_tokens``.
        progress: called with the number of passages done, and the bytes of the files that have been read and their
            total. Those of .parquet and compressed files count once the file is read.

    Raises:
        As ``EmbeddingSource.open``, ``find_sources``, ``read_pieces``, ``TextEmbedder.embed_tokens`` and
        ``write_index``.
    """
    check_index_dtype(dtype)
    if not files:
        raise DataError("give at least one file or folder of text")
    sources, opened = find_sources(files), EmbeddingSource.open(source)
    writing = _Indexing(opened, sources, key, batch_size, progress)
    made_by = {"path": _absolute(opened), **opened.identity()}
    index = write_index(out, writing.batches(), dtype=dtype, model=made_by)
    return IndexSummary(index, sources, writing.num_cut, writing.num_empty, opened.longest)


def search_passages(
    location: str | Path,
    queries: Sequence[str],
    k: int,
    *,
    model: str | Path | None = None,
    progress: Callable[[str, int, int], None] = lambda phase, done, total: None,
) -> list[list[Hit]]:
    """Returns the ``k`` passages of the index at ``location`` that are closest to each query, as ``search`` does.

    Args:
        model: where the model that made the index is; by default where it was then.
        progress: called with what is being done, how much of it is done, and the total.

    Raises:
        ConfigError: as ``search``; a query is empty; or the model is another one than that of the index.
        DataError: the index is damaged.
        CheckpointError: the model cannot be loaded.
    """
    if k < 1:
        raise ConfigError(f"the number of passages to find must be 1 or more; got {k}; use 10")
    for query in queries:
        _check_query(query)
    index = PassageIndex.open(location)
    opened = _model_of(index, model)
    progress("checking the index", 0, 1)
    index.verify(lambda done, total: progress("checking the index", done, total))
    progress("loading the model", 0, 1)
    embedder = opened.load()
    embeddings = embedder.embed(queries, progress=lambda done, total: progress("embedding queries", done, total))
    found = search(index, embeddings.float(), k, lambda done, total: progress("searching passages", done, total))
    rows = zip(*(part.tolist() for part in found), strict=True)
    return [_hits(index, scores, ids) for scores, ids in rows]


def read_queries(path: str | Path) -> list[str]:
    """Returns the queries of a .jsonl or .parquet file, one under "query" in each line or row; other keys are ignored.

    Raises DataError as ``read_records``, or if a query is missing, empty or not valid text, or there are none.
    """
    queries = []
    for source in find_sources([path]).files:  # those of a folder are plain text, which read_records refuses
        for position, record in read_records(source, ["query"]):
            queries.append(_query_of(record, place_of(source, position)))
    if not queries:
        raise DataError(f"{path} must contain at least one query; write one record with 'query' per line")
    return queries


class _Indexing:
    """The passages of ``sources`` with their embeddings; counts what was truncated or empty."""

    def __init__(
        self,
        opened: EmbeddingSource,
        sources: Sources,
        key: str,
        batch_size: int | None,
        progress: Callable[[int, int, int], None],
    ) -> None:
        self._opened, self._sources, self._key = opened, sources, key
        self._batch_size, self._progress = batch_size, progress
        self._total = sum(source.size for source in sources.files)
        self._num_done = 0
        self.num_cut = self.num_empty = 0

    def batches(self) -> Iterator[tuple[Tensor, list[Passage]]]:
        """Yields embeddings [n, D] of n passages, and these, in the order of the files. Loads the model first."""
        embedder = self._opened.load()
        self._progress(0, 0, self._total)
        passages: list[Passage] = []
        were_cut: list[bool] = []
        num_characters = bytes_done = 0
        for source in self._sources.files:
            for passage, was_cut, num_read in _passages_of(source, self._key):
                if not passage.text.strip():
                    self.num_empty += 1
                    continue
                passages.append(passage)
                were_cut.append(was_cut)
                num_characters += len(passage.text)
                if len(passages) >= _TEXTS_AT_ONCE or num_characters >= _CHARACTERS_AT_ONCE:
                    yield self._embedded(embedder, passages, were_cut, bytes_done + num_read), passages
                    passages, were_cut, num_characters = [], [], 0
            bytes_done += source.size
        if passages:
            yield self._embedded(embedder, passages, were_cut, bytes_done), passages

    def _embedded(
        self, embedder: TextEmbedder, passages: Sequence[Passage], were_cut: Sequence[bool], bytes_read: int
    ) -> Tensor:
        encoded = embedder.encode([passage.text for passage in passages])
        self.num_cut += sum(text.was_cut or was_cut for text, was_cut in zip(encoded, were_cut, strict=True))
        before = self._num_done
        embeddings = embedder.embed_tokens(
            [text.tokens for text in encoded],
            batch_size=self._batch_size,
            progress=lambda done, total: self._progress(before + done, bytes_read, self._total),
        )
        self._num_done += len(passages)
        return embeddings


def _passages_of(source: Source, key: str) -> Iterator[tuple[Passage, bool, int]]:
    """Yields the documents of ``source``, whether each has more text than is kept, and the bytes of the file read."""
    # of a path whose bytes are not UTF-8, which JSON cannot hold
    name = os.fsencode(source.name).decode(errors="replace")
    kept: list[str] = []
    number = num_characters = num_read = 0
    was_cut, in_bytes = False, source.format != "parquet" and not source.is_compressed
    for piece in read_pieces(source, key):
        if num_characters + len(piece.text) <= _LONGEST_TEXT:
            kept.append(piece.text)
            num_characters += len(piece.text)
        else:
            was_cut, num_characters = True, _LONGEST_TEXT
        num_read += piece.num_bytes
        if piece.is_last:
            yield Passage("".join(kept), name, number), was_cut, min(num_read, source.size) if in_bytes else 0
            kept, num_characters, was_cut, number = [], 0, False, number + 1


def _model_of(index: PassageIndex, given: str | Path | None) -> EmbeddingSource:
    """The model that made ``index``. Raises ConfigError or CheckpointError that says what to do."""
    made_by = dict(index.model)
    recorded = made_by.pop("path", None)
    if given is None and not isinstance(recorded, str):
        raise ConfigError(f"{index.store} does not say where its model is; give the run with --model")
    path = recorded if given is None else given
    try:
        opened = EmbeddingSource.open(path)
        identity = opened.identity()
    except (CheckpointError, ConfigError, DataError, StorageError) as error:
        if given is not None:
            raise
        raise CheckpointError(
            f"{index.store} was made by the model in {path}, which cannot be read: {error}; give the run or "
            "checkpoint where it is now with --model, or make the index again with: megalith data index"
        ) from error
    if differing := [name for name in {**made_by, **identity} if made_by.get(name) != identity.get(name)]:
        raise ConfigError(
            f"{path} is not the model that made {index.store}, so their embeddings cannot be compared; they differ in "
            f"{', '.join(differing)}; give a copy of that model with --model, or make the index again with: "
            f"megalith data index {path} FILES... --out INDEX"
        )
    return opened


def _hits(index: PassageIndex, scores: Sequence[float], ids: Sequence[int]) -> list[Hit]:
    return [Hit(*each) for each in zip(ids, scores, index.passages(ids), strict=True)]


def _query_of(record: Mapping[str, Any], place: str) -> str:
    """Returns the query in ``record``, which is at ``place``. Raises DataError."""
    query = record.get("query")
    if not isinstance(query, str) or not query.strip():
        given = repr(query) if "query" in record else f"the keys {', '.join(map(repr, record)) or 'of nothing'}"
        raise DataError(
            f"{place} must have a query, as text under 'query'; got {given:.80}; add it, or remove the record"
        )
    try:
        query.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place} must be text; character {error.start} of the query is an unpaired surrogate"
        ) from error
    return query


def _check_query(query: str) -> None:
    if not query.strip():
        raise ConfigError("a query must not be empty; give some text to search for")
    try:
        query.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"a query must be text in UTF-8; character {error.start} is {query[error.start]!r}, half of a surrogate "
            "pair, which may also stand for a byte of the command line that is not UTF-8"
        ) from error


def _absolute(opened: EmbeddingSource) -> str:
    store = opened.checkpoint
    return os.path.abspath(store.path) if isinstance(store, LocalStore) else str(store)
