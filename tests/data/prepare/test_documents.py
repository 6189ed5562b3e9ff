"""documents: the ranges of a file add up to the file, wherever it is cut; non-text is refused with its position."""

import gzip
import json
import sys
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from megalith.data.prepare import documents
from megalith.data.prepare.documents import read_pieces, read_records, row_group_bytes
from megalith.data.prepare.sources import find_sources
from megalith.errors import DataError, MissingDependencyError

TEXT = "".join(f"line {n} naïve 🦜\n" * (n % 4) + "\n" * (n % 3) for n in range(60)) + "日本" * 200 + "\nend"


@pytest.fixture
def blocks_of_64_bytes(monkeypatch):
    monkeypatch.setattr(documents, "BLOCK_BYTES", 64)


def source(path, content: bytes):
    path.write_bytes(content)
    (found,) = find_sources([path]).files
    return found


def texts(found, start=0, stop=None, key="text"):
    """The documents of a range, each unsplit."""
    whole: dict[int, str] = {}
    for piece in read_pieces(found, key, start, stop):
        whole[piece.document] = whole.get(piece.document, "") + piece.text
    return list(whole.values())


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_text_is_one_document_in_pieces_that_end_with_lines(name, tmp_path, blocks_of_64_bytes):
    content = TEXT.encode()
    pieces = list(read_pieces(source(tmp_path / name, gzip.compress(content) if ".gz" in name else content), "text"))
    assert "".join(piece.text for piece in pieces) == TEXT
    assert sum(piece.num_bytes for piece in pieces) == len(content)
    assert max(piece.num_bytes for piece in pieces) <= 2 * 64
    assert [piece.is_last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert {piece.document for piece in pieces} == {0}
    assert all(piece.text.endswith("\n") for piece in pieces[:-1] if "日" not in piece.text and piece.text)


@given(
    lines=st.lists(st.text("ab\n日🦜", max_size=90), max_size=12),
    cuts=st.lists(st.integers(0, 14), max_size=3),
)
def test_any_cut_into_ranges_gives_the_same_pieces(lines, cuts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cuts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "BLOCK_BYTES", 16)
        content = "".join(lines).encode()
        found = source(folder / "a.txt", content)
        whole = list(read_pieces(found, "text"))
        assert len(whole) == max(1, -(-len(content) // 16))
        bounds = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
        parts = [
            piece
            for start, stop in pairwise(bounds)
            if start < stop
            for piece in read_pieces(found, "text", start, stop)
        ]
        assert parts == whole
        assert "".join(piece.text for piece in whole).encode() == content


def test_a_range_of_lines_holds_those_that_begin_in_it(tmp_path):
    lines = [json.dumps({"text": f"document {n} " + "x" * (n * 7 % 40)}) + "\n" * (1 + n % 2) for n in range(20)]
    content = "".join(lines).encode()
    found = source(tmp_path / "a.jsonl", content)
    whole = texts(found)
    assert len(whole) == 20
    assert whole[3].startswith("document 3 x")
    for cut in range(len(content) + 1):
        assert texts(found, 0, cut) + texts(found, cut) == whole
    packed = source(tmp_path / "a.jsonl.gz", gzip.compress(content))
    assert list(read_pieces(packed, "text")) == list(read_pieces(found, "text"))


def test_a_long_document_comes_in_pieces(tmp_path, blocks_of_64_bytes):
    documents_in = [TEXT, "", "short", "x" * 300]
    found = source(tmp_path / "a.jsonl", "\n".join(json.dumps({"text": text}) for text in documents_in).encode())
    pieces = list(read_pieces(found, "text"))
    assert texts(found) == documents_in
    assert max(len(piece.text) for piece in pieces) <= 64
    assert sum(piece.is_last for piece in pieces) == 4


def test_a_byte_order_mark_is_no_text(tmp_path):
    assert texts(source(tmp_path / "a.txt", b"\xef\xbb\xbfhello")) == ["hello"]
    assert texts(source(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "hello"}')) == ["hello"]


def test_the_text_can_have_another_key(tmp_path):
    assert texts(source(tmp_path / "a.jsonl", b'{"text": "no", "body": "yes"}'), key="body") == ["yes"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": ', r"a\.jsonl, line 4, must be one JSON object in UTF-8; Expecting value"),
        (b"[" * 100_000, r"line 4, must be one JSON object"),
        (b'{"text": "\xff"}', r"line 4, must be one JSON object in UTF-8; 'utf-8' codec"),
        (b'["text"]', r"line 4, must be a JSON object; got list"),
        (b'{"title": 1, "body": 2}', r"line 4, .* under 'text'; it has 'title', 'body'; set --key"),
        (b"{}", r"under 'text'; it has no keys"),
        (b'{"text": null}', r"line 4, must have text under 'text'; got NoneType"),
        (rb'{"text": "x\ud83d"}', r"line 4, .* character 1 under 'text' is an unpaired surrogate"),
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_line_that_is_no_document_is_refused_by_its_number(name, line, message, tmp_path):
    content = b'{"text": "one"}\n\n{"text": "three"}\n' + line + b'\n{"text": "five"}\n'
    found = source(tmp_path / name, gzip.compress(content) if ".gz" in name else content)
    with pytest.raises(DataError, match=message.replace("jsonl,", name.removeprefix("a.") + ",")):
        texts(found)


def test_text_that_is_not_utf8_is_refused_by_the_byte(tmp_path, blocks_of_64_bytes):
    with pytest.raises(DataError, match=r"a\.txt must be UTF-8 text; byte 1000 is invalid; convert it.*iconv"):
        texts(source(tmp_path / "a.txt", b"0123456789\n" * 90 + b"0123456789\xe9 x"))


def test_a_gzip_file_cut_short_is_refused_by_name(tmp_path):
    packed = gzip.compress(TEXT.encode())
    for content in (packed[:-20], b"no gzip", packed[:50] + b"\0\0\0\0" + packed[54:]):
        with pytest.raises(DataError, match=r"a\.txt\.gz cannot be read to the end"):
            texts(source(tmp_path / "a.txt.gz", content))


@pytest.fixture
def table(tmp_path):
    """Six rows in groups of two, with a long third row."""
    rows = {"text": ["zero", "one", "two" * 50, "", "four", "five"], "nulls": ["x", None] * 3, "n": range(6)}
    parquet.write_table(pa.table({key: list(column) for key, column in rows.items()}), tmp_path / "a.parquet", 2)
    (found,) = find_sources([tmp_path / "a.parquet"]).files
    return found


def test_every_row_of_a_parquet_file_is_a_document(table, blocks_of_64_bytes):
    assert texts(table) == ["zero", "one", "two" * 50, "", "four", "five"]
    assert len(row_group_bytes(table)) == 3
    assert texts(table, 1, 2) == ["two" * 50, ""]
    assert [piece.document for piece in read_pieces(table, "text", 1)] == [2, 2, 2, 3, 4, 5]


def test_a_parquet_file_without_text_is_refused_by_place(table, tmp_path):
    with pytest.raises(DataError, match=r"must have a text column 'body'; it has \['text', 'nulls', 'n'\]; set --key"):
        texts(table, key="body")
    with pytest.raises(DataError, match=r"a\.parquet, row 1, must have text in 'nulls'; got NoneType"):
        texts(table, key="nulls")
    with pytest.raises(DataError, match=r"row 0, must have text in 'n'; got int"):
        texts(table, key="n")
    with pytest.raises(DataError, match=r"b\.parquet must be a parquet file"):
        row_group_bytes(source(tmp_path / "b.parquet", b"PAR1 it is not"))


def parquet_of(path, **columns):
    parquet.write_table(pa.table(columns), path)
    (found,) = find_sources([path]).files
    return found


def not_utf8(*texts: bytes) -> pa.Array:
    offsets = pa.array([sum(map(len, texts[:n])) for n in range(len(texts) + 1)], pa.int32()).buffers()[1]
    return pa.Array.from_buffers(pa.string(), len(texts), [None, offsets, pa.py_buffer(b"".join(texts))])


def test_of_the_columns_of_a_record_only_the_named_ones_are_read(tmp_path):
    times = pa.array([1, 2], pa.timestamp("ns"))
    found = parquet_of(tmp_path / "a.parquet", id=times, prompt=["a", "b"], other=not_utf8(b"a", b"\xff"))
    assert list(read_records(found, ["prompt", "tools"])) == [(0, {"prompt": "a"}), (1, {"prompt": "b"})]
    with pytest.raises(DataError, match=r"some of the columns tools, text; it has \['id', 'prompt', 'other'\]"):
        list(read_records(found, ["tools", "text"]))
    with pytest.raises(
        DataError, match=r"a\.parquet, row 1, must have text in UTF-8, .*\['other'\]; .*decode byte 0xff"
    ):
        list(read_records(found, ["other"]))
    with pytest.raises(DataError, match=r"a\.parquet, row 0, must have text in UTF-8, numbers, .*\['id'\]; Nanosecond"):
        list(read_records(found, ["id"]))


def test_without_pyarrow_the_way_out_is_named(table, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)  # marks a module as not importable
    with pytest.raises(MissingDependencyError, match=r"pip install 'megalith\[parquet\]'"):
        texts(table)
