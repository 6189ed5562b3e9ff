"""The benchmark of recipes bert-tiny and classification-tiny: its baselines without a model."""

import csv
from pathlib import Path

import pytest

from benchmarks import bert_tiny
from benchmarks.bert_tiny import WithoutAModel, _passages, _split_by_package, _without_a_model
from megalith.data.labelled import prepare_labelled
from megalith.data.prepare import prepare

LEARNED = [(f"read the file {name}", "io") for name in "abc"] + [(f"add the number {name}", "math") for name in "ab"]
HELD_OUT = [("read the file d", "io"), ("add the number d", "math"), ("add the number e", "math")]


def test_counts_of_words_and_of_tokens_tell_passages_apart_that_share_no_word(tmp_path: Path):
    (tmp_path / "text.txt").write_text("\n".join(text for text, _ in LEARNED))
    prepare([tmp_path / "text.txt"], tmp_path / "text", vocab_size=300, special_tokens=["bert"])
    for name, rows in (("train", LEARNED), ("valid", HELD_OUT)):
        with (tmp_path / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([("text", "label"), *rows])
        out = tmp_path / ("passages" if name == "train" else "passages-valid")
        prepare_labelled(tmp_path / f"{name}.csv", out, tmp_path / "text-tokenizer.json")
    found = _without_a_model(str(tmp_path / "passages"), tmp_path)
    assert found == WithoutAModel(commonest=1 / 3, bag_of_words=1.0, bag_of_tokens=1.0)


def test_as_many_passages_of_each_package_are_held_out_from_files_of_their_own(tmp_path, monkeypatch):
    for name, size in (("_EACH", 6), ("_EACH_HELD_OUT", 2), ("_PACKAGES", 2)):
        monkeypatch.setattr(bert_tiny, name, size)
    files = [tmp_path / package / f"{number}.py" for package in ("a", "b", "c") for number in range(8)]
    for number, path in enumerate([*files, tmp_path / "small" / "0.py", tmp_path / "module.py"]):
        path.parent.mkdir(exist_ok=True)
        lines = 4 if path.parent.name == "c" else 8  # c has the fewest passages
        path.write_text("\n".join(f"line {line} of file {number}" for line in range(lines)))
    kept, held_out = _split_by_package(sorted(tmp_path.rglob("*.py")))
    assert len([path for path in held_out if path.parent.name == "a"]) == 2
    assert not set(kept) & set(held_out)
    learned, valid = _passages(kept, held_out)
    assert [label for _, label in learned] == ["a"] * 6 + ["b"] * 6
    assert [label for _, label in valid] == ["a"] * 2 + ["b"] * 2
    texts = "\n".join(path.read_text() for path in held_out)
    assert all(text in texts for text, _ in valid)
    assert not any(text in texts for text, _ in learned)
    monkeypatch.setattr(bert_tiny, "_PACKAGES", 4)
    with pytest.raises(SystemExit, match=r"4 packages of the standard library must have 6 passages and 2 .* found 3"):
        _passages(kept, held_out)
