"""Tokenizes pairs of a query and a passage, with hard negatives, into an indexed dataset.

One document per pair, whose sequences are the query, the positive passage and the negatives, without special tokens.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megalith.data.index_file import companion
from megalith.data.indexed_dataset import IndexedDatasetBuilder, best_dtype
from megalith.data.pairs.records import read_pair_records
from megalith.data.prepare.checks import check_prefix
from megalith.data.prepare.documents import place_of, text_pieces
from megalith.data.prepare.sources import Source, Sources, find_sources
from megalith.data.special_tokens import bert_tokens
from megalith.data.tokenizer import Tokenizer
from megalith.errors import ConfigError, DataError

__all__ = ["PairsSummary", "prepare_pairs"]

Progress = Callable[[str, int, int], None]  # phase, bytes done, total bytes

_AT_ONCE = 1 << 18  # characters that are encoded together; encoding takes about 250 bytes of memory for each


@dataclass(frozen=True)
class PairsSummary:
    """What was written.

    Attributes:
        num_negatives: the smallest and the largest number of negatives of a pair.
        num_cut_queries, num_cut_passages: truncated texts.
        valid: the held-out dataset.
    """

    prefix: Path
    num_pairs: int
    num_tokens: int
    num_negatives: tuple[int, int]
    num_cut_queries: int
    num_cut_passages: int
    valid: "PairsSummary | None" = None


def prepare_pairs(
    files: Sequence[str | Path],
    out: str | Path,
    tokenizer: str | Path,
    *,
    valid: Sequence[str | Path] = (),
    max_query_tokens: int | None = None,
    max_passage_tokens: int | None = None,
    eod: str | None = None,
    progress: Progress = lambda phase, done, total: None,
) -> PairsSummary:
    """Tokenizes the pairs of ``files`` (``records.py``) into the dataset ``out``, which appears once it is complete.

    Args:
        files: .jsonl (also as .gz) or .parquet.
        tokenizer: the tokenizer.json of the model to train.
        valid: files of held-out pairs, for ``out-valid``; nothing is written unless these are valid too.
        max_query_tokens: maximum tokens per query; longer ones are truncated. By default none is.
        max_passage_tokens: the same for positives and negatives.
        eod: as in ``Tokenizer``.
        progress: called now and then with the phase, the bytes done and the total.

    Raises:
        ConfigError: a maximum is below 1, or ``out`` is a folder.
        DataError: a file is not in one of these formats, has a record that is not a pair, an empty text, or no pairs;
            the tokenizer lacks one of BERT's special tokens; a file of ``out`` exists already.
        StorageError: the disk is full or not writable.
    """
    limits = (max_query_tokens, max_passage_tokens)
    for flag, maximum in zip(("--max-query-tokens", "--max-passage-tokens"), limits, strict=True):
        if maximum is not None and maximum < 1:
            raise ConfigError(f"{flag} must be 1 or more; got {maximum}; leave it out to keep all tokens")
    check_prefix(Path(out))
    out, path, loaded = Path(os.path.abspath(out)), Path(os.path.abspath(tokenizer)), Tokenizer.load(tokenizer, eod)
    bert_tokens(loaded)  # an encoder reads each text between two of them; refused here, before anything is written
    sources = _find(files, valid)
    with contextlib.ExitStack() as stack:
        writers: list[_PairWriter] = []
        for is_held_out in (True, False) if valid else (False,):  # the training set is published last
            prefix = companion(out, "-valid") if is_held_out else out
            builder = stack.enter_context(IndexedDatasetBuilder(prefix, best_dtype(loaded.vocab_size)))
            writers.append(_PairWriter(builder, loaded, limits, is_held_out=is_held_out))
        for writer in writers:
            writer.write(sources, progress)
        *held_out, training = [writer.finalize(path, sources) for writer in writers]
    return dataclasses.replace(training, valid=held_out[0] if held_out else None)


def _find(files: Sequence[str | Path], valid: Sequence[str | Path]) -> Sources:
    """The files to read. Raises DataError for one that cannot hold records."""
    if not files:
        raise DataError("give at least one file of pairs")
    sources = find_sources(files, valid)
    for source in sources.files:
        if source.format == "text":
            raise DataError(
                f"pairs must be in .jsonl or .parquet files, one in each line or row; got {source.path}; convert it, "
                "or give the files of a folder themselves"
            )
    return sources


@dataclass(frozen=True)
class _Piece:
    """A piece of a text; long texts are cut at line ends, so that encoding them needs little memory.

    Attributes:
        position: that of the text's record in ``source``.
        number: of the text in its pair: 0 is the query, 1 the positive, others are negatives.
    """

    text: str
    source: Source
    position: int
    number: int
    ends_text: bool
    ends_pair: bool


class _PairWriter:
    """Encodes pairs into ``builder``; ``limits`` are the maximum tokens of a query and of a passage."""

    def __init__(
        self,
        builder: IndexedDatasetBuilder,
        tokenizer: Tokenizer,
        limits: tuple[int | None, int | None],
        *,
        is_held_out: bool,
    ) -> None:
        self._builder, self._tokenizer, self._limits = builder, tokenizer, limits
        self._is_held_out = is_held_out
        self._num_tokens = 0  # of the current text, before it is truncated
        self._num_cut = [0, 0]  # queries, passages
        self._num_negatives: tuple[int, int] | None = None  # least and most

    def write(self, sources: Sources, progress: Progress) -> None:
        """Encodes all pairs of this writer's files. Raises DataError."""
        own = [source for source in sources.files if source.held_out == self._is_held_out]
        total, done = sum(source.size for source in own), 0
        phase = "held out" if self._is_held_out else "encode"
        progress(phase, 0, total)
        for source in own:
            for pieces in _batches(source):
                encoded = self._tokenizer.encode_batch([piece.text for piece in pieces])
                for piece, ids in zip(pieces, encoded, strict=True):
                    self._add(piece, ids)
                in_bytes = source.format == "jsonl" and not source.is_compressed
                progress(phase, done + (pieces[-1].position if in_bytes else 0), total)
            done += source.size
            progress(phase, done, total)
        if not self._builder.num_documents:
            names = ", ".join(str(source.path) for source in own)
            raise DataError(f"{names:.200} must contain at least one pair; write one record per line")

    def finalize(self, tokenizer: Path, sources: Sources) -> PairsSummary:
        """Publishes the dataset."""
        builder, loaded = self._builder, self._tokenizer
        assert self._num_negatives is not None, "there is at least one pair"
        builder.finalize(
            tokenizer=os.path.relpath(tokenizer, builder.prefix.parent),
            tokenizer_sha256=loaded.sha256,
            vocab_size=loaded.vocab_size,
            eod=loaded.eod,
            sources=sources.records(held_out=self._is_held_out),
            pairs=True,
        )
        cut_queries, cut_passages = self._num_cut
        return PairsSummary(
            builder.prefix, builder.num_documents, builder.num_tokens, self._num_negatives, cut_queries, cut_passages
        )

    def _add(self, piece: _Piece, ids: Sequence[int]) -> None:
        is_passage = piece.number > 0
        limit = self._limits[is_passage]
        self._builder.write(ids if limit is None else ids[: max(0, limit - self._num_tokens)])
        self._num_tokens += len(ids)
        if not piece.ends_text:
            return
        if not self._num_tokens:
            name = ("query", "positive")[piece.number] if piece.number < 2 else f"negative {piece.number - 1}"
            raise DataError(
                f"{place_of(piece.source, piece.position)} must have texts that the tokenizer encodes to at least one "
                f"token; its {name} has none; remove it"
            )
        self._num_cut[is_passage] += limit is not None and self._num_tokens > limit
        self._num_tokens = 0
        self._builder.end_sequence()
        if piece.ends_pair:
            self._builder.end_document()
            number = piece.number - 1
            least, most = self._num_negatives or (number, number)
            self._num_negatives = min(least, number), max(most, number)


def _batches(source: Source) -> Iterator[list[_Piece]]:
    """The pieces of the texts of ``source``, as many together as are encoded at once."""
    batch: list[_Piece] = []
    num_characters = 0
    for position, pair in read_pair_records(source):
        texts = (pair.query, pair.positive, *pair.negatives)
        for number, text in enumerate(texts):
            for piece, is_last in text_pieces(text):
                batch.append(_Piece(piece, source, position, number, is_last, is_last and number == len(texts) - 1))
                num_characters += len(piece)
                if num_characters >= _AT_ONCE:
                    yield batch
                    batch, num_characters = [], 0
    if batch:
        yield batch
