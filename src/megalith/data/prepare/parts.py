"""Splits a job into parts that processes encode independently, and encodes one part.

The split depends only on the sources, not on the number of processes, and where a long text is cut depends only on its
file (``documents.py``). The output is therefore identical however the parts are distributed.
"""

import contextlib
import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megalith.data.chat.encoder import ChatEncoder
from megalith.data.chat.format import ChatFormat
from megalith.data.chat.records import CHAT_FIELDS
from megalith.data.index_file import companion
from megalith.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder, best_dtype, remove_dataset
from megalith.data.prepare.documents import BLOCK_BYTES, Piece, place_of, read_pieces, read_records, row_group_bytes
from megalith.data.prepare.sentences import split_sentences
from megalith.data.prepare.sources import Source
from megalith.data.tokenizer import Tokenizer
from megalith.errors import DataError

__all__ = [
    "Encoding",
    "Part",
    "Split",
    "append_part",
    "encode_part",
    "is_encoded",
    "plan_parts",
    "settled_fraction",
    "training_parts",
    "training_texts",
]

Split = Literal["train", "valid"]

_NUM_PARTS = 256
_LEAST_BYTES, _MOST_BYTES = 16 * BLOCK_BYTES, 1024 * BLOCK_BYTES
_MOST_FILES = 4096
_TRAINING_BYTES = 1 << 30  # more text hardly changes the merges, but needs more memory


@dataclass(frozen=True)
class Range:
    """A range of a source, in the units of ``read_pieces``."""

    source: Source
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True)
class Part:
    """The unit of work of one process: whole documents, or a range of one long document."""

    ranges: tuple[Range, ...]
    num_bytes: int  # on disk
    begins_inside: bool = False  # its document began in the previous part
    ends_inside: bool = False  # its document continues in the next part


@dataclass(frozen=True)
class Encoding:
    """Settings shared by all parts. ``folder`` holds ``tokenizer.json`` and receives the encoded parts."""

    folder: Path
    eod: int
    begin: tuple[int, ...]  # ids prepended to every document
    key: str
    valid_fraction: float
    splits: tuple[Split, ...]  # "train" last: its .idx marks the part as complete
    split_sentences: bool = False  # one sequence per sentence
    chat: ChatFormat | None = None  # the sources hold conversations, not texts


def plan_parts(sources: Sequence[Source]) -> list[Part]:
    """Returns the parts of a job in document order. Raises DataError for an invalid parquet file."""
    target = sum(source.size for source in sources) // _NUM_PARTS
    target = min(max(target - target % BLOCK_BYTES, _LEAST_BYTES), _MOST_BYTES)
    parts: list[Part] = []
    group: list[Range] = []
    group_bytes = 0
    for source in sources:
        is_cut = source.size > target and not source.is_compressed
        if group and (is_cut or group_bytes >= target or len(group) >= _MOST_FILES):
            parts.append(Part(tuple(group), group_bytes))
            group, group_bytes = [], 0
        if is_cut:
            parts += _parts_of(source, target)
        else:
            group.append(Range(source))
            group_bytes += source.size
    return [*parts, Part(tuple(group), group_bytes)] if group else parts


def training_texts(parts: Sequence[Part], key: str, valid_fraction: float) -> Iterator[tuple[str, int]]:
    """Yields text for tokenizer training and the bytes read so far: about 1 GiB of the files, without held-out text.

    The size of a compressed file is that on disk, so more text than that may be read.
    """
    share = _TRAINING_BYTES / max(1, sum(part.num_bytes for part in parts))
    done = 0
    for part in parts:
        for index, (source, piece) in enumerate(_pieces(part, key)):
            is_chosen = _draw("tokenizer", source, piece.document, index) < share
            if is_chosen and not _is_held_out(source, piece.document, valid_fraction):
                yield piece.text, done
        done += part.num_bytes


def settled_fraction(parts: Sequence[Part], key: str | None, fraction: float) -> float:
    """Returns ``fraction``, or the nearest value that leaves a document with text in both sets.

    A small number of documents may all fall on one side of ``fraction``: with 0.02, forty documents do so in 45 % of
    cases. Reads documents until one of each set has been seen, 1 / ``fraction`` on average. With fewer than two
    documents the result is ``fraction``. Without ``key`` each record is a document.
    """
    if fraction == 0.0:
        return fraction
    lowest, highest = 1.0, 0.0
    for part in parts:
        for source, document in _documents(part, key):
            draw = _draw("held out", source, document)
            lowest, highest = min(lowest, draw), max(highest, draw)
            if lowest < fraction <= highest:
                return fraction
    if lowest >= highest:
        return fraction
    return math.nextafter(lowest, 1.0) if lowest >= fraction else highest


def encode_part(encoding: Encoding, number: int, part: Part) -> int:
    """Writes part ``number`` as one indexed dataset per split; returns ``number``.

    Every document begins with ``begin`` and ends with ``eod``, except empty ones, which have no tokens. If sentences
    are split, ``eod`` is the last token of the last sentence, and a sentence also ends where a long text was cut into
    pieces. The sequences of conversations alternate between context and what is learned (``Sidecar.conversations``).

    Raises:
        DataError: a source is invalid.
        StorageError: the disk is full or not writable.
    """
    tokenizer = _tokenizer(encoding.folder / "tokenizer.json", encoding.eod)
    with contextlib.ExitStack() as stack:
        builders: dict[Split, IndexedDatasetBuilder] = {}
        for split in encoding.splits:
            prefix = _prefix(encoding.folder, number, split)
            remove_dataset(prefix)  # left by a process that was killed between two splits
            builders[split] = stack.enter_context(IndexedDatasetBuilder(prefix, best_dtype(tokenizer.vocab_size)))
        if encoding.chat is None:
            text_bytes = _encode(encoding, part, tokenizer, builders)
        else:
            text_bytes = _encode_chats(encoding, part, ChatEncoder(tokenizer, encoding.chat, warn=False), builders)
        for split, builder in builders.items():
            builder.finalize(text_bytes=text_bytes[split])
    return number


def is_encoded(folder: Path, number: int) -> bool:
    """Whether part ``number`` is complete."""
    return companion(_prefix(folder, number, "train"), ".idx").exists()


def append_part(builder: IndexedDatasetBuilder, encoding: Encoding, number: int, part: Part, split: Split) -> int:
    """Appends the ``split`` of part ``number``, joining a document that was cut; returns its bytes of text."""
    dataset = IndexedDataset(_prefix(encoding.folder, number, split))
    if not (part.begins_inside or part.ends_inside):
        builder.add_dataset(dataset)
    elif dataset.num_documents:
        if encoding.split_sentences:
            builder.add_sequences(dataset)
        else:
            for start in range(0, dataset.num_tokens, BLOCK_BYTES):
                builder.write(dataset.tokens[start : start + BLOCK_BYTES])
        if not part.ends_inside:
            builder.end_document()
    return 0 if dataset.sidecar is None else dataset.sidecar.text_bytes


def training_parts(encoding: Encoding, num_parts: int) -> Iterator[IndexedDataset]:
    """Yields the training documents of each encoded part."""
    yield from (IndexedDataset(_prefix(encoding.folder, number, "train")) for number in range(num_parts))


def _encode(
    encoding: Encoding, part: Part, tokenizer: Tokenizer, builders: dict[Split, IndexedDatasetBuilder]
) -> dict[Split, int]:
    """Encodes the pieces of ``part`` into ``builders``; returns the bytes of text of each split."""
    text_bytes = dict.fromkeys(builders, 0)
    has_tokens = part.begins_inside
    is_open = False  # the current sequence has tokens
    for source, piece in _pieces(part, encoding.key):
        split: Split = "valid" if _is_held_out(source, piece.document, encoding.valid_fraction) else "train"
        for ids in tokenizer.encode_batch(split_sentences(piece.text) if encoding.split_sentences else [piece.text]):
            if encoding.split_sentences and is_open and ids:
                builders[split].end_sequence()
            if ids and not (has_tokens or is_open):
                builders[split].write(encoding.begin)
            builders[split].write(ids)
            is_open = is_open or bool(ids)
        text_bytes[split] += piece.num_bytes
        has_tokens = has_tokens or is_open
        if piece.is_last:
            if has_tokens:
                builders[split].write([encoding.eod])
            builders[split].end_document()
            has_tokens = is_open = False
    if part.ends_inside:
        builders[split].end_document()
    return text_bytes


def _encode_chats(
    encoding: Encoding, part: Part, encoder: ChatEncoder, builders: dict[Split, IndexedDatasetBuilder]
) -> dict[Split, int]:
    """Encodes the conversations of ``part`` into ``builders``; returns the bytes of text of each split."""
    text_bytes = dict.fromkeys(builders, 0)
    for source, document, record in _records(part):
        split: Split = "valid" if _is_held_out(source, document, encoding.valid_fraction) else "train"
        try:
            encoded = encoder(record)
        except DataError as error:
            raise DataError(f"{place_of(source, document)} {error}") from error
        for chat in encoded:
            builders[split].add_document(chat.tokens, chat.lengths)
            text_bytes[split] += chat.num_bytes
    return text_bytes


def _documents(part: Part, key: str | None) -> Iterator[tuple[Source, int]]:
    """Source and position of the documents with text, some repeatedly."""
    if key is None:
        yield from ((source, document) for source, document, _ in _records(part))
    else:
        yield from ((source, piece.document) for source, piece in _pieces(part, key) if piece.text)


def _records(part: Part) -> Iterator[tuple[Source, int, dict[str, Any]]]:
    for range in part.ranges:
        for document, record in read_records(range.source, CHAT_FIELDS, range.start, range.stop):
            yield range.source, document, record


def _pieces(part: Part, key: str) -> Iterator[tuple[Source, Piece]]:
    for range in part.ranges:
        for piece in read_pieces(range.source, key, range.start, range.stop):
            yield range.source, piece


def _parts_of(source: Source, target: int) -> Iterator[Part]:
    """Splits a large file into parts of about ``target`` bytes."""
    if source.format == "parquet":
        first, size = 0, 0
        sizes = row_group_bytes(source)
        for group, group_bytes in enumerate(sizes):
            size += group_bytes
            if size >= target or group == len(sizes) - 1:
                begin, end = (source.size * n // len(sizes) for n in (first, group + 1))
                yield Part((Range(source, first, group + 1),), end - begin)
                first, size = group + 1, 0
        return
    is_document = source.format == "text"
    unit = BLOCK_BYTES if is_document else 1
    for start in range(0, source.size, target):
        stop = min(start + target, source.size)
        yield Part(
            (Range(source, start // unit, -(-stop // unit)),),
            stop - start,
            begins_inside=is_document and start > 0,
            ends_inside=is_document and stop < source.size,
        )


def _is_held_out(source: Source, document: int, fraction: float) -> bool:
    return source.held_out or _draw("held out", source, document) < fraction


def _draw(purpose: str, source: Source, *numbers: int) -> float:
    """A hash of the document in [0, 1), independent of the location of its folder and of the process that reads it."""
    name = "\0".join([source.key, *map(str, numbers)]).encode(errors="surrogateescape")  # names may be any bytes
    digest = hashlib.blake2b(name, digest_size=6, key=purpose.encode()).digest()
    return int.from_bytes(digest, "little") / 2**48


def _prefix(folder: Path, number: int, split: Split) -> Path:
    return folder / f"{number:06}-{split}"


@functools.lru_cache(maxsize=1)
def _tokenizer(path: Path, eod: int) -> Tokenizer:
    """Cached between the parts of a process; the tokenizer in a folder of parts never changes."""
    return Tokenizer.load(path, eod)
