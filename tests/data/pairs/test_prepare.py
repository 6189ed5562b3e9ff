"""Pairs as a dataset: one document per record, texts as they are, and readers of plain texts refuse it."""

import json
from itertools import pairwise

import pytest

from megalith.config.masking_config import MaskingConfig
from megalith.data.bert_dataset import BertDataset
from megalith.data.chat.dataset import ChatDataset
from megalith.data.gpt_dataset import GPTDataset
from megalith.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megalith.data.labelled_dataset import LabelledTexts
from megalith.data.pairs import prepare as preparation
from megalith.data.pairs.prepare import prepare_pairs
from megalith.data.special_tokens import SPECIAL_TOKENS
from megalith.data.t5_dataset import T5Dataset
from megalith.data.tokenizer import train_byte_level_bpe
from megalith.errors import ConfigError, DataError
from tests.data.pairs.examples import PAIRS, as_records, write_lines, write_pairs, write_tokenizer


@pytest.fixture
def tokenizer(tmp_path):
    return write_tokenizer(tmp_path / "tokenizer.json")


def texts_of(dataset, tokenizer):
    """The texts of each document."""
    texts = [tokenizer.decode(dataset.get(number).tolist()) for number in range(len(dataset))]
    bounds = dataset.document_indices.tolist()
    return [texts[first:end] for first, end in pairwise(bounds)]


WANT = [[query, positive, *negatives] for query, positive, negatives in PAIRS]


def test_each_pair_is_a_document_of_its_texts(tokenizer, tmp_path):
    files = [write_lines(tmp_path / f"{n}.jsonl", as_records(PAIRS[n:][:1])) for n in range(3)]
    found = prepare_pairs(files, tmp_path / "x", tmp_path / "tokenizer.json")
    dataset = IndexedDataset(tmp_path / "x")
    assert texts_of(dataset, tokenizer) == WANT
    assert (found.num_pairs, found.num_negatives, found.num_tokens) == (3, (2, 5), dataset.num_tokens)
    assert (found.num_cut_queries, found.num_cut_passages, found.valid) == (0, 0, None)
    sidecar = json.loads((tmp_path / "x.json").read_text())
    assert sidecar["pairs"] is True
    assert sidecar["tokenizer"] == "tokenizer.json"
    assert [source["name"] for source in sidecar["sources"]] == ["0.jsonl", "1.jsonl", "2.jsonl"]


def test_long_texts_are_encoded_in_pieces(tokenizer, tmp_path, monkeypatch):
    long = "who wrote it, how far\n" * 9_000  # three pieces, each of whole lines
    file = write_lines(tmp_path / "x.jsonl", as_records([("why", long, ["far"]), *PAIRS]))
    monkeypatch.setattr(preparation, "_AT_ONCE", 100_000)
    sizes = []

    def encode(self, texts):
        sizes.append(sum(map(len, texts)))
        return original(self, texts)

    original = type(tokenizer).encode_batch
    monkeypatch.setattr(type(tokenizer), "encode_batch", encode)
    prepare_pairs([file], tmp_path / "x", tmp_path / "tokenizer.json")
    monkeypatch.undo()
    assert texts_of(IndexedDataset(tmp_path / "x"), tokenizer) == [["why", long, "far"], *WANT]
    assert len(sizes) > 1
    assert max(sizes) < 100_000 + 65_536


def test_long_texts_are_cut_where_it_is_asked_for(tokenizer, tmp_path, monkeypatch):
    file = write_lines(tmp_path / "x.jsonl", as_records())
    found = prepare_pairs([file], tmp_path / "x", tmp_path / "tokenizer.json", max_query_tokens=4, max_passage_tokens=5)
    ids = [[tokenizer.encode(text) for text in pair] for pair in WANT]
    dataset = IndexedDataset(tmp_path / "x")
    want = [text[: 5 if number else 4] for pair in ids for number, text in enumerate(pair)]
    assert [dataset.get(number).tolist() for number in range(len(dataset))] == want
    assert found.num_cut_queries == sum(len(pair[0]) > 4 for pair in ids) > 0
    assert found.num_cut_passages == sum(len(text) > 5 for pair in ids for text in pair[1:]) > 0
    assert found.num_tokens == sum(map(len, want))


def test_a_text_in_pieces_is_cut_as_a_whole(tokenizer, tmp_path):
    long = "who wrote it, how far\n" * 9_000
    file = write_lines(tmp_path / "x.jsonl", [{"query": "why", "positive": long}])
    num_tokens = 3 * len(tokenizer.encode(long)) // 4
    found = prepare_pairs([file], tmp_path / "x", tmp_path / "tokenizer.json", max_passage_tokens=num_tokens)
    assert found.num_cut_passages == 1
    assert IndexedDataset(tmp_path / "x").get(1).tolist() == tokenizer.encode(long)[:num_tokens]


def test_held_out_pairs_are_a_dataset_of_their_own(tokenizer, tmp_path):
    train, valid = (write_lines(tmp_path / f"{n}.jsonl", as_records(PAIRS[n:][:2])) for n in range(2))
    found = prepare_pairs([train], tmp_path / "x", tmp_path / "tokenizer.json", valid=[valid])
    assert texts_of(IndexedDataset(tmp_path / "x"), tokenizer) == WANT[:2]
    assert texts_of(IndexedDataset(tmp_path / "x-valid"), tokenizer) == WANT[1:]
    assert (found.prefix, found.valid.prefix) == (tmp_path / "x", tmp_path / "x-valid")
    assert found.valid.num_negatives == (2, 5)


def test_progress_ends_with_all_bytes(tokenizer, tmp_path):
    train, valid = (write_lines(tmp_path / f"{n}.jsonl", as_records()) for n in range(2))
    shown = []
    prepare_pairs(
        [train], tmp_path / "x", tmp_path / "tokenizer.json", valid=[valid], progress=lambda *given: shown.append(given)
    )
    size = train.stat().st_size
    assert [given for given in shown if given[1] == given[2]] == [("held out", size, size), ("encode", size, size)]
    assert all(0 <= done <= total for _, done, total in shown)


@pytest.mark.parametrize(
    ("train", "valid", "says"),
    [
        ('{"query": "q"}', None, r"0\.jsonl, line 1, must have a query and passages"),
        ('{"query": "q", "positive": "p"}', '{"query": "q"}', r"1\.jsonl, line 1, must have a query and passages"),
        ("\n", None, r"0\.jsonl must contain at least one pair; write one record per line"),
        ('{"query": "q", "positive": "p"}', "", r"1\.jsonl must contain at least one pair"),
    ],
)
def test_nothing_is_written_unless_all_of_it_is_valid(train, valid, says, tokenizer, tmp_path):
    (tmp_path / "0.jsonl").write_text(train)
    (tmp_path / "1.jsonl").write_text(valid or "")
    held_out = [] if valid is None else [tmp_path / "1.jsonl"]
    with pytest.raises(DataError, match=says):
        prepare_pairs([tmp_path / "0.jsonl"], tmp_path / "x", tmp_path / "tokenizer.json", valid=held_out)
    assert not [path for path in tmp_path.iterdir() if "x" in path.name.split(".")[0]]


def test_a_text_without_tokens_is_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    write_tokenizer(path)
    content = json.loads(path.read_text())
    content["normalizer"] = {"type": "Replace", "pattern": {"String": "?"}, "content": ""}
    path.write_text(json.dumps(content))
    records = [("why", "two", []), ("how", "far", ["no", "??"])]
    with pytest.raises(DataError, match=r"line 2, must have texts .* its negative 2 has none; remove it"):
        write_pairs(tmp_path, pairs=records)


def test_wrong_arguments_are_refused(tokenizer, tmp_path):
    file, path = write_lines(tmp_path / "x.jsonl", as_records()), tmp_path / "tokenizer.json"
    for name in ("max_query_tokens", "max_passage_tokens"):
        flag = name.replace("_", "-")
        with pytest.raises(ConfigError, match=f"--{flag} must be 1 or more; got 0; leave it out"):
            prepare_pairs([file], tmp_path / "y", path, **{name: 0})
    with pytest.raises(ConfigError, match="must be a file name prefix, not a folder"):
        prepare_pairs([file], tmp_path, path)
    with pytest.raises(DataError, match="at least one file"):
        prepare_pairs([], tmp_path / "y", path)
    with pytest.raises(DataError, match=r"is given twice, which would train on text that is held out"):
        prepare_pairs([file], tmp_path / "y", path, valid=[file])
    (tmp_path / "x.txt").write_text("words")
    with pytest.raises(DataError, match=r"in \.jsonl or \.parquet files.*got .*x\.txt; convert it"):
        prepare_pairs([tmp_path / "x.txt"], tmp_path / "y", path)
    train_byte_level_bpe(["one text"], vocab_size=300).save(tmp_path / "plain.json")
    with pytest.raises(DataError, match=r"a tokenizer with a classifier token \(\[CLS\] or <s>\)"):
        prepare_pairs([file], tmp_path / "y", tmp_path / "plain.json")
    assert not list(tmp_path.glob("y*"))


def test_nothing_is_overwritten(tokenizer, tmp_path):
    prefix = write_pairs(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("x*")}
    with pytest.raises(DataError, match=r"already contains x\.bin"):
        prepare_pairs([tmp_path / "x.jsonl"], prefix, tmp_path / "tokenizer.json")
    assert {path.name: path.read_bytes() for path in tmp_path.glob("x*")} == before


def with_sentinels():
    return train_byte_level_bpe(["one text"], 400, SPECIAL_TOKENS["t5"])


READERS = {
    "GPT": lambda prefix, tokenizer: GPTDataset(prefix, 16, 0),
    "BERT": lambda prefix, tokenizer: BertDataset(prefix, tokenizer, 32, 0, MaskingConfig()),
    "T5": lambda prefix, _: T5Dataset(prefix, with_sentinels(), 32, 16, 0, MaskingConfig()),
    "labelled": lambda prefix, tokenizer: LabelledTexts(prefix, tokenizer, 32),
}


@pytest.mark.parametrize("name", READERS)
def test_readers_of_texts_refuse_pairs(name, tokenizer, tmp_path):
    prefix = write_pairs(tmp_path)
    with pytest.raises(DataError, match=r"x must contain texts; it holds pairs .*: megalith data prepare"):
        READERS[name](prefix, tokenizer)


def test_pairs_are_no_conversations(tokenizer, tmp_path):
    with pytest.raises(DataError, match="must hold conversations"):
        ChatDataset(write_pairs(tmp_path), 16, 0)


def test_a_text_dataset_says_nothing_about_pairs(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "x", "uint16") as builder:
        builder.add_document([1, 2])
        builder.finalize()
    assert "pairs" not in json.loads((tmp_path / "x.json").read_text())
