"""parts: a job's parts cover its sources exactly once, and documents that were cut are put back together."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from megalith.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megalith.data.prepare import documents, parts
from megalith.data.prepare.parts import Encoding, append_part, encode_part, is_encoded, plan_parts, training_texts
from megalith.data.prepare.sources import find_sources
from megalith.data.tokenizer import train_byte_level_bpe

LONG = "".join(f"line {n} of a long text\n" for n in range(200))
SHORT = ["alpha", "", "gamma\n" * 30, "delta"]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Blocks of 64 bytes, parts of 256."""
    for module in (documents, parts):
        monkeypatch.setattr(module, "BLOCK_BYTES", 64)
    monkeypatch.setattr(parts, "_LEAST_BYTES", 256)
    monkeypatch.setattr(parts, "_MOST_BYTES", 256)


@pytest.fixture
def sources(tmp_path):
    """One source of each kind, in the order of the documents ``[LONG, *SHORT, LONG, *SHORT, "small"]``."""
    (tmp_path / "long.txt").write_text(LONG)
    (tmp_path / "short.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in SHORT))
    (tmp_path / "long.txt.gz").write_bytes(gzip.compress(LONG.encode()))
    parquet.write_table(pa.table({"text": SHORT}), tmp_path / "rows.parquet", 1)
    (tmp_path / "small.txt").write_text("small")
    return find_sources(
        [tmp_path / name for name in ("long.txt", "short.jsonl", "long.txt.gz", "rows.parquet", "small.txt")]
    ).files


def encode(sources, folder, valid_fraction=0.0, splits=("train",)):
    """The final content of each split: documents as text, ends of documents as #."""
    folder.mkdir(exist_ok=True)
    tokenizer = train_byte_level_bpe([LONG], 270)
    tokenizer.save(folder / "tokenizer.json")
    encoding = Encoding(folder, tokenizer.eod, (), "text", valid_fraction, splits)
    plan = plan_parts(sources)
    for number, part in enumerate(plan):
        assert not is_encoded(folder, number)
        assert encode_part(encoding, number, part) == number
        assert is_encoded(folder, number)
    found = {}
    for split in splits:
        with IndexedDatasetBuilder(folder / split, np.uint16) as builder:
            text_bytes = sum(append_part(builder, encoding, number, part, split) for number, part in enumerate(plan))
            builder.finalize(text_bytes=text_bytes)
        dataset = IndexedDataset(folder / split)
        starts = dataset.document_starts()
        found[split] = [
            tokenizer.decode(dataset.tokens[starts[d] : starts[d + 1]]).replace("<|endoftext|>", "#")
            for d in range(dataset.num_documents)
        ]
        assert dataset.sidecar.text_bytes == sum(len(text.rstrip("#")) for text in found[split])
    return found


def test_documents_come_out_in_order_whole_and_ended(sources, tmp_path):
    ended = [f"{text}#" if text else "" for text in [LONG, *SHORT]]  # an empty document has no token at all
    assert encode(sources, tmp_path / "out")["train"] == [*ended, *ended, "small#"]


def test_a_last_part_whose_line_began_in_the_part_before_still_ends_its_document(tmp_path):
    text = "x" * 63 * 4 + "x" * 4 + "tail\n"  # the parts are [0, 256) and [256, 261)
    (tmp_path / "a.txt").write_text(text)
    sources = find_sources([tmp_path / "a.txt"]).files
    assert len(plan_parts(sources)) == 2
    assert encode(sources, tmp_path / "out")["train"] == [f"{text}#"]


def test_every_byte_is_in_one_part(sources):
    plan = plan_parts(sources)
    assert sum(part.num_bytes for part in plan) == sum(source.size for source in sources)
    ranges = [range for part in plan for range in part.ranges]
    long = [range for range in ranges if range.source.name == "long.txt"]
    assert [range.start for range in long[1:]] == [range.stop for range in long[:-1]]
    assert (long[0].start, long[-1].stop) == (0, -(-len(LONG) // 64))
    rows = [range for range in ranges if range.source.name == "rows.parquet"]
    assert (rows[0].start, [range.stop for range in rows[:-1]], rows[-1].stop) == (0, [r.start for r in rows[1:]], 4)
    assert len(rows) > 1


def test_small_files_share_a_part_up_to_its_size(tmp_path):
    for n in range(20):
        (tmp_path / f"{n:02}.txt").write_text("x" * 100)
    plan = plan_parts(find_sources([tmp_path]).files)
    assert [len(part.ranges) for part in plan] == [3] * 6 + [2]


def test_a_held_out_document_is_in_one_set_only_and_whole(sources, tmp_path):
    everything = encode(sources, tmp_path / "all")["train"]
    splits = ("valid", "train")
    for fraction in (0.3, 0.7):
        found = encode(sources, tmp_path / f"some{fraction}", fraction, splits)
        assert 0 < len(found["valid"]) < len(everything)
        assert sorted(found["train"] + found["valid"]) == sorted(everything)
    assert encode(sources, tmp_path / "none", 0.0, splits) == {"train": everything, "valid": []}


def test_the_share_held_out_is_the_one_asked_for_and_grows_within_itself(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"{n}"}) + "\n" for n in range(5000)))
    plan = plan_parts(find_sources([tmp_path / "a.jsonl"]).files)
    kept = {fraction: {text for text, _ in training_texts(plan, "text", fraction)} for fraction in (0.0, 0.05, 0.2)}
    assert [len(kept[fraction]) for fraction in kept] == pytest.approx([5000, 4750, 4000], abs=100)
    assert kept[0.2] < kept[0.05] < kept[0.0]


def test_text_to_train_on_is_thinned_evenly_and_always_alike(sources, monkeypatch):
    plan = plan_parts(sources)
    everything = [text for text, _ in training_texts(plan, "text", 0.0)]
    monkeypatch.setattr(parts, "_TRAINING_BYTES", sum(part.num_bytes for part in plan) // 2)
    half = [text for text, _ in training_texts(plan, "text", 0.0)]
    assert half == [text for text, _ in training_texts(plan, "text", 0.0)]
    assert set(half) < set(everything)
    assert len(half) == pytest.approx(len(everything) / 2, rel=0.3)


def test_a_part_killed_between_its_two_sets_is_written_again(sources, tmp_path):
    splits = ("valid", "train")
    expected = encode(sources, tmp_path / "whole", 0.5, splits)
    (tmp_path / "killed").mkdir()
    with IndexedDatasetBuilder(tmp_path / "killed" / "000001-valid", np.uint16) as builder:
        builder.add_document([1, 2, 3])
        builder.finalize()
    assert encode(sources, tmp_path / "killed", 0.5, splits) == expected
