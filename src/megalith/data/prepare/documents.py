"""Reads the documents of a source in pieces that fit in memory; a piece depends on its file only.

Long text is cut at line ends: a plain text file at the first one after every 64 KiB, so that a range of blocks can be
read without the text before it.
"""

import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

from megalith import optional
from megalith.data.prepare.sources import Source
from megalith.errors import DataError

__all__ = ["BLOCK_BYTES", "Piece", "place_of", "read_pieces", "read_records", "row_group_bytes", "text_pieces"]

BLOCK_BYTES = 1 << 16  # encoding takes about 250 bytes of memory per byte
_LONGEST_LINE = 1 << 27  # bytes of a document in .jsonl; parsing needs a few times as much memory
_ROWS = 64  # rows of a parquet file in memory at once


@dataclass(frozen=True)
class Piece:
    """A piece of one document; pieces of a document follow each other.

    ``document`` is the position of the document in its source: a byte offset (in the decompressed text) or a row.
    """

    document: int
    text: str
    num_bytes: int  # of the text in UTF-8
    is_last: bool  # the last piece of its document


def read_pieces(source: Source, key: str, start: int = 0, stop: int | None = None) -> Iterator[Piece]:
    """Yields the pieces from ``start`` to ``stop`` (None: the end), in blocks of text, bytes of .jsonl, or row groups.

    A line of .jsonl belongs to the range in which it begins. ``key`` is the field or column that holds the text.

    Raises:
        DataError: the file is not UTF-8, does not have the format of its suffix, or a document has no text; the message
            includes the position.
    """
    with _readable(source):
        if source.format == "parquet":
            yield from _read_texts(source, key, start, stop)
            return
        with source.open() as file:
            if source.format == "jsonl":
                for offset, line in _lines(source, file, start, stop):
                    yield from _cut(offset, _text_of(source, line, offset, key))
            else:
                yield from _read_text(source, file, start, stop)


def read_records(
    source: Source, fields: Sequence[str], start: int = 0, stop: int | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields position and fields of each line of .jsonl or row of .parquet; ``start`` and ``stop`` as ``read_pieces``.

    Of a .parquet file, only the columns among ``fields`` are read, whatever the others contain. Fields of a row that
    are null are left out, in nested ones too: a column has the same fields in every row.

    Raises:
        DataError: as ``read_pieces``, or ``source`` has another format.
    """
    with _readable(source):
        if source.format == "parquet":
            for row, record in _rows(source, fields, start, stop):
                yield row, _without_nulls(record)
        elif source.format == "jsonl":
            with source.open() as file:
                for offset, line in _lines(source, file, start, stop):
                    yield offset, _object_of(source, line, offset)
        else:
            raise DataError(f"{source.path} must be .jsonl or .parquet, with one record in each line or row")


def place_of(source: Source, document: int) -> str:
    """``path, line n,`` or ``path, row n,`` for the record at position ``document``."""
    return f"{source.path}, row {document}," if source.format == "parquet" else _place(source, document)


def text_pieces(text: str) -> Iterator[tuple[str, bool]]:
    """Yields pieces of at most BLOCK_BYTES characters, cut at line ends if possible, and whether each is the last."""
    start = 0
    while True:
        stop = len(text)
        if stop - start > BLOCK_BYTES:
            stop = text.rfind("\n", start, start + BLOCK_BYTES) + 1 or start + BLOCK_BYTES
        yield text[start:stop], stop == len(text)
        if stop == len(text):
            return
        start = stop


@contextmanager
def _readable(source: Source) -> Iterator[None]:
    try:
        yield
    except (EOFError, zlib.error, OSError) as error:
        raise DataError(f"{source.path} cannot be read to the end: {error}; copy or compress it again") from error


def row_group_bytes(source: Source) -> list[int]:
    """The uncompressed size in bytes of each row group of a parquet file."""
    with _open_parquet(source) as file:
        groups = range(file.metadata.num_row_groups)
        return [file.metadata.row_group(group).total_byte_size for group in groups]


def _read_text(source: Source, file: BinaryIO, start: int, stop: int | None) -> Iterator[Piece]:
    for offset, block, is_last in _blocks(file, start, stop):
        try:
            text = block.decode("utf-8-sig" if offset == 0 else "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{source.path} must be UTF-8 text; byte {offset + error.start} is invalid; convert it, for example "
                f"with: iconv -f LATIN1 -t UTF-8 {source.path.name}"
            ) from error
        yield Piece(0, text, len(block), is_last)


def _blocks(file: BinaryIO, start: int, stop: int | None) -> Iterator[tuple[int, bytes, bool]]:
    """Blocks ``start`` to ``stop``: the offset of each, its bytes, and whether it is the last of the file.

    Block k starts at the first line that begins at or after byte k * BLOCK_BYTES, and ends where block k + 1 starts.
    """
    file.seek(max(0, start * BLOCK_BYTES - 1))
    before = file.read(1) if start else b"\n"
    raw = file.read(BLOCK_BYTES)
    skip = _line_start(before, raw)
    number = start
    while number != stop:
        following = file.read(BLOCK_BYTES)
        head = _line_start(raw[-1:], following)
        yield number * BLOCK_BYTES + skip, raw[skip:] + following[:head], not following
        if not following:
            return
        raw, skip, number = following, head, number + 1


def _line_start(before: bytes, raw: bytes) -> int:
    """The offset of the first line that begins in ``raw``, or else of the first character; ``before`` precedes it."""
    if before == b"\n":
        return 0
    if (newline := raw.find(b"\n")) >= 0:
        return newline + 1
    return next((index for index, byte in enumerate(raw) if byte & 0xC0 != 0x80), len(raw))


def _lines(source: Source, file: BinaryIO, start: int, stop: int | None) -> Iterator[tuple[int, bytes]]:
    """The lines that are not empty, and the offset of each."""
    file.seek(max(0, start - 1))
    if start:
        file.readline()
    offset = file.tell()
    while (stop is None or offset < stop) and (line := file.readline(_LONGEST_LINE + 1)):
        if len(line) > _LONGEST_LINE:
            raise DataError(
                f"{_place(source, offset)} must have at most {_LONGEST_LINE:,} bytes, because a line is read "
                "into memory at once; check that each line contains a single document"
            )
        if line.strip():
            yield offset, line
        offset += len(line)


def _object_of(source: Source, line: bytes, offset: int) -> dict[str, Any]:
    try:
        document = json.loads(line.decode("utf-8-sig" if offset == 0 else "utf-8"))
    except (ValueError, RecursionError) as error:
        way_out = _way_out(source, line)
        raise DataError(f"{_place(source, offset)} must be one JSON object in UTF-8; {error}; {way_out}") from error
    if not isinstance(document, dict):
        given = type(document).__name__
        raise DataError(f"{_place(source, offset)} must be a JSON object; got {given}; {_way_out(source, line)}")
    return document


def _way_out(source: Source, line: bytes) -> str:
    """How to fix a ``line`` that is not an object; a file that is one list begins with a bracket."""
    if line.lstrip(b"\xef\xbb\xbf \t").startswith(b"["):
        return f"write each object of the list on its own line, for example with: jq -c '.[]' {source.path.name}"
    return "write one object per line"


def _text_of(source: Source, line: bytes, offset: int, key: str) -> str:
    document = _object_of(source, line, offset)
    if key not in document:
        keys = ", ".join(map(repr, document)) or "no keys"
        raise DataError(f"{_place(source, offset)} must have its text under {key!r}; it has {keys}; set --key")
    text = document[key]
    if not isinstance(text, str):
        raise DataError(f"{_place(source, offset)} must have text under {key!r}; got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{_place(source, offset)} must be text; character {error.start} under {key!r} is an unpaired surrogate"
        ) from error
    return text


def _place(source: Source, offset: int) -> str:
    """``path, line n,`` for the line that begins at byte ``offset``."""
    number = 1
    with source.open() as file:
        while offset > 0 and (block := file.read(min(offset, BLOCK_BYTES))):
            number += block.count(b"\n")
            offset -= len(block)
    return f"{source.path}, line {number},"


def _read_texts(source: Source, key: str, start: int, stop: int | None) -> Iterator[Piece]:
    for row, record in _rows(source, [key], start, stop):
        text = record[key]
        if not isinstance(text, str):
            raise DataError(f"{source.path}, row {row}, must have text in {key!r}; got {type(text).__name__}")
        yield from _cut(row, text)


def _rows(source: Source, names: Sequence[str], start: int, stop: int | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of row groups ``start`` to ``stop``, and the number of each: the columns ``names``, one at least."""
    with _open_parquet(source) as file:
        columns = file.schema_arrow.names
        chosen = [name for name in names if name in columns]
        if not chosen:
            if len(names) == 1:
                raise DataError(f"{source.path} must have a text column {names[0]!r}; it has {columns}; set --key")
            raise DataError(f"{source.path} must have some of the columns {', '.join(names)}; it has {columns}")
        groups = range(file.metadata.num_row_groups)[start:stop]
        row = sum(file.metadata.row_group(group).num_rows for group in range(start))
        for batch in file.iter_batches(batch_size=_ROWS, row_groups=list(groups), columns=chosen):
            for record in _values(source, batch, row):
                yield row, record
                row += 1


def _values(source: Source, batch: Any, first_row: int) -> list[dict[str, Any]]:
    try:
        values: list[dict[str, Any]] = batch.to_pylist()
        return values
    except ValueError:  # text that is not UTF-8, or a time in nanoseconds
        values = []
    for number in range(batch.num_rows):
        try:
            values += batch.slice(number, 1).to_pylist()
        except ValueError as error:
            raise DataError(
                f"{source.path}, row {first_row + number}, must have text in UTF-8, numbers, lists and objects in "
                f"{batch.schema.names}; {error}; convert it"
            ) from error
    return values


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _open_parquet(source: Source) -> Any:
    parquet = optional.need("pyarrow.parquet")
    source.check_unchanged()
    try:
        return parquet.ParquetFile(source.path)
    except (ValueError, OSError) as error:
        raise DataError(f"{source.path} must be a parquet file; {error}") from error


def _cut(document: int, text: str) -> Iterator[Piece]:
    for piece, is_last in text_pieces(text):
        yield Piece(document, piece, len(piece.encode()), is_last)
