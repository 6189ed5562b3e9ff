"""megalith data inspect: its output for datasets prepared here or written elsewhere."""

from pathlib import Path

import numpy as np
import pytest

from megalith.data import token_ids
from megalith.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megalith.data.tokenizer import train_byte_level_bpe
from tests.program import Ended, here

TEXTS = {"a.txt": "the cat sat on the mat\n" * 20, "b.txt": "\x1b[31mred\ttext", "c.txt": "", "d.txt": "last"}


@pytest.fixture
def prefix(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in TEXTS.items():
        Path(name).write_text(text)
    assert here("data", "prepare", *TEXTS, "--out", "made/c", "--vocab-size", 270).code == 0
    return "made/c"


def inspect(*arguments: object) -> Ended:
    found = here("data", "inspect", *arguments)
    assert found.code == 0, found
    return found


def test_it_counts_and_shows_the_first_documents(prefix):
    lines = inspect(prefix).out.splitlines()
    dataset = IndexedDataset(prefix)
    lengths = np.diff(dataset.document_starts())
    assert lines[:7] == [
        "dataset     made/c",
        "documents   4, 1 of them empty",
        f"tokens      {dataset.num_tokens} of uint16, {2 * dataset.num_tokens} bytes",
        f"lengths     0 to {lengths.max()} tokens, median {int(np.median(lengths))}",
        f"text        {dataset.sidecar.text_bytes / dataset.num_tokens:.2f} bytes per token",
        "tokenizer   270 entries, made/c-tokenizer.json; 0 '<|endoftext|>' ends a document",
        "sources     a.txt, b.txt, c.txt, d.txt",
    ]
    first = lines.index(f"document 0, {lengths[0]} tokens")
    assert lines[first + 1] == "  | the cat sat on the mat"
    second = lines.index(f"document 1, {lengths[1]} tokens")
    assert lines[second + 1] == r"  | \x1b[31mred\ttext<|endoftext|>"  # no colour for the terminal
    assert "document 2, 0 tokens" in lines
    assert not any(line.startswith("document 3") for line in lines)


def test_the_most_frequent_tokens_come_with_their_share_and_text(prefix):
    lines = inspect(prefix, "--documents", 0, "--top", 2).out.splitlines()
    tokens = IndexedDataset(prefix).tokens
    ids, counts = np.unique(tokens, return_counts=True)
    at = next(n for n, line in enumerate(lines) if line.startswith("most frequent"))
    assert lines[at] == (
        f"most frequent of {len(tokens)} tokens; {len(ids)} of 270 ids occur, {ids.min()} to {ids.max()}"
    )
    assert len(lines[at + 1 :]) == 2
    share, percent, token_id, *_, bar = lines[at + 1].split()
    assert (float(share), percent) == (round(100 * counts.max() / len(tokens), 2), "%")
    assert counts[ids == int(token_id)] == counts.max()
    assert bar == "#" * 30
    assert inspect(prefix, "--documents", 0, "--top", 0).out.splitlines()[-1].startswith("sources")


def test_a_long_document_is_cut_and_a_large_file_is_sampled(prefix, monkeypatch):
    monkeypatch.setattr("megalith.data.inspection._SHOWN_TOKENS", 5)
    monkeypatch.setattr(token_ids, "_CHUNK", 10)
    monkeypatch.setattr(token_ids, "_NUM_CHUNKS", 3)
    found = inspect(prefix, "--documents", 1).out
    assert found.count("  | ...") == 1
    num_tokens = IndexedDataset(prefix).num_tokens
    last = num_tokens % 10 or 10
    assert f"most frequent of {20 + last}, evenly spread, of {num_tokens} tokens" in found


def test_a_dataset_of_somebody_else_shows_ids_until_a_tokenizer_is_given(tmp_path):
    tokenizer = train_byte_level_bpe(["x"], 257)
    tokenizer.save(tmp_path / "t.json")
    with IndexedDatasetBuilder(tmp_path / "x", "int64") as builder:
        builder.add_document(tokenizer.encode("hello"))
        builder.add_document([5, 2**60, -1])
        builder.finalize()
    (tmp_path / "x.json").unlink()
    unknown = inspect(tmp_path / "x").out
    assert f"tokenizer   not recorded by {tmp_path / 'x'}; give --tokenizer PATH" in unknown
    assert f"  | 5 {2**60} -1" in unknown
    known = inspect(tmp_path / "x", "--tokenizer", tmp_path / "t.json").out
    assert "  | hello" in known
    assert f"  | 5 {2**60} -1" in known  # no text has these


def test_a_tokenizer_that_is_gone_is_no_reason_to_stop(prefix):
    Path("made/c-tokenizer.json").unlink()
    found = inspect(prefix).out
    assert "tokenizer   made/c-tokenizer.json must be a tokenizer.json; it cannot be read" in found
    assert "or give --tokenizer PATH" in found


def test_a_dataset_without_tokens_is_shown(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "x", "int32") as builder:
        builder.finalize()
    assert inspect(tmp_path / "x").out.splitlines()[1:3] == ["documents   0", "tokens      0 of int32, 0 bytes"]


def other_tokenizer(prefix: str) -> list[object]:
    train_byte_level_bpe(["x"], 257).save("other.json")
    return [prefix, "--tokenizer", "other.json"]


def floats(_: str) -> list[object]:
    with IndexedDatasetBuilder("floats", "float32") as builder:
        builder.add_document([1.0])
        builder.finalize()
    return ["floats"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (lambda _: ["none"], "none.idx cannot be read"),
        (lambda prefix: [f"{prefix}.bin"], "leave out the .bin"),
        (lambda prefix: [prefix, "--documents", -1], "the number of documents to show must be 0 or more; got -1"),
        (lambda prefix: [prefix, "--top", -1], "--top must be 0 or more; got -1"),
        (other_tokenizer, "other.json is not the tokenizer that made made/c"),
        (floats, "floats has dtype float32"),
    ],
)
def test_a_mistake_is_one_message(arguments, says, prefix):
    found = here("data", "inspect", *arguments(prefix))
    assert (found.code, found.out) == (2, ""), found
    assert found.err.startswith("error: ")
    assert found.err.count("\n") == 1
    assert says in found.err
