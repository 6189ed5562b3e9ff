"""Records of pairs: the published forms are read, and anything else is refused with its file and line."""

import gzip
import json
import re

import pytest

from megalith.data.pairs.records import PairRecord, read_pair_records, read_pairs
from megalith.data.prepare.sources import find_sources
from megalith.errors import DataError
from tests.data.pairs.examples import write_lines

# as on the pages of all-nli and msmarco-hard-negatives (sentence-transformers), of FlagEmbedding's fine-tuning, of
# Tevatron/msmarco-passage and of biencoder-nq-train.json (DPR), shortened
PUBLISHED = {
    "sentence-transformers, triplets": (
        {"anchor": "A person on a horse", "positive": "A person is outdoors", "negative": "A person is at a diner"},
        [PairRecord("A person on a horse", "A person is outdoors", ("A person is at a diner",))],
    ),
    "sentence-transformers, numbered": (
        {"query": "q", "positive": "p", "negative_10": "n10", "negative_2": "n2", "negative_1": "n1"},
        [PairRecord("q", "p", ("n1", "n2", "n10"))],
    ),
    "sentence-transformers, a list": (
        {"anchor": "q", "positive": "p", "negative": "n0", "negatives": ["n1", "n2"], "score": 0.5},
        [PairRecord("q", "p", ("n0", "n1", "n2"))],
    ),
    "sentence-transformers, pairs": ({"anchor": "q", "positive": "p"}, [PairRecord("q", "p")]),
    "FlagEmbedding": (
        {"query": "q", "pos": ["p1", "p2"], "neg": ["n1", "n2"], "pos_scores": [0.9, 0.8], "id": 1, "type": "normal"},
        [PairRecord("q", "p1", ("n1", "n2")), PairRecord("q", "p2", ("n1", "n2"))],
    ),
    "Tevatron": (
        {
            "query_id": "1185869",
            "query": "what was the impact of the manhattan project",
            "positive_passages": [{"docid": "0", "title": "Introduction", "text": "The presence of"}],
            "negative_passages": [{"docid": "1", "title": "", "text": "Atomic"}, {"docid": "2", "text": "Bombs"}],
        },
        [
            PairRecord(
                "what was the impact of the manhattan project", "Introduction The presence of", ("Atomic", "Bombs")
            )
        ],
    ),
    "DPR": (
        {
            "dataset": "nq_train_psgs_w100",
            "question": "big little lies season 2 how many episodes",
            "answers": ["seven"],
            "positive_ctxs": [{"title": "Big Little Lies", "text": "series", "score": 1000, "passage_id": "18768923"}],
            "negative_ctxs": [{"title": "Other", "text": "easy"}],
            "hard_negative_ctxs": [{"title": None, "text": "hard"}],
        },
        [PairRecord("big little lies season 2 how many episodes", "Big Little Lies series", ("hard",))],
    ),
    "DPR, without hard negatives": (
        {
            "question": "q",
            "positive_ctxs": [{"title": "t", "text": "p"}],
            "negative_ctxs": [{"title": "t", "text": "n"}],
            "hard_negative_ctxs": [],
        },
        [PairRecord("q", "t p", ("t n",))],
    ),
    "a value of null": ({"query": "q", "positive": "p", "negative": None, "neg": None}, [PairRecord("q", "p")]),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_forms_are_read(name):
    record, pairs = PUBLISHED[name]
    assert read_pairs(record) == pairs


REFUSED = {
    "none of the forms": ({"text": "a"}, r"anchor or query, positive; query, pos; .*; it has 'text'; rename its keys"),
    "no keys": ({}, "it has no keys"),
    "an empty query": ({"query": " ", "positive": "p"}, "text as query; it is empty; add the text, or"),
    "an empty positive": ({"query": "q", "positive": ""}, "text as positive; it is empty"),
    "an empty negative": ({"query": "q", "positive": "p", "negative_3": ""}, "as negative_3; it is empty"),
    "no positives": ({"query": "q", "pos": []}, "at least one passage under 'pos'; it has none; add one, or remove"),
    "a number": ({"query": 3, "positive": "p"}, "text as query; got int 3; write a string"),
    "a list of positives": ({"query": "q", "positive": ["p"]}, r"text as positive; got list \['p'\]"),
    "a text for a list": ({"query": "q", "pos": "p"}, r"a list under 'pos'; got str 'p'; enclose it in brackets"),
    "a text for a passage": (
        {"query": "q", "positive_passages": ["p"]},
        r"a title and a text as positive_passages\[0\]; got str 'p'; write plain texts under query, pos and neg",
    ),
    "a passage without text": (
        {"question": "q", "positive_ctxs": [{"title": " "}]},
        r"text as positive_ctxs\[0\].text; it is empty",
    ),
    "a title that is a number": (
        {"question": "q", "positive_ctxs": [{"title": 3, "text": "p"}]},
        r"text as positive_ctxs\[0\].title; got int 3",
    ),
    "half of a character": ({"query": "q", "positive": "\ud83d"}, "character 0 is an unpaired surrogate; remove it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_pair_is_refused_with_its_line(name, tmp_path):
    record, says = REFUSED[name]
    file = write_lines(tmp_path / "x.jsonl", [{"query": "q", "positive": "p"}, record])
    [source] = find_sources([file]).files
    with pytest.raises(DataError, match=f"(?s)^{re.escape(str(file))}, line 2, must have .*{says}"):
        list(read_pair_records(source))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"query": ', "must be one JSON object in UTF-8; .*; write one object per line"),
        (b'[{"query": "q"}]', r"must be a JSON object; got list; write each object .*: jq -c '.\[\]' x.jsonl"),
        (b"[", r"must be one JSON object .*: jq -c '.\[\]' x.jsonl"),
        (b'"\xff"', "must be one JSON object in UTF-8"),
    ],
)
def test_a_line_that_is_no_object_is_refused(line, says, tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'{"query": "q", "positive": "p"}\n\n' + line + b"\n")
    [source] = find_sources([tmp_path / "x.jsonl"]).files
    with pytest.raises(DataError, match=rf"x\.jsonl, line 3, {says}"):
        list(read_pair_records(source))


def test_compressed_files_and_columns_are_read_too(tmp_path):
    pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    rows = [{"anchor": "a", "positive": "b", "negative_1": "c"}, {"anchor": "d", "positive": "e", "negative_1": None}]
    with gzip.open(tmp_path / "x.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    want = [PairRecord("a", "b", ("c",)), PairRecord("d", "e")]
    for name in ("x.jsonl.gz", "x.parquet"):
        [source] = find_sources([tmp_path / name]).files
        assert [pair for _, pair in read_pair_records(source)] == want
