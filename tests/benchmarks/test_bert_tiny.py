"""The benchmark of recipes bert-tiny and classification-tiny: its baselines without a model."""

import csv
from pathlib import Path

from benchmarks.bert_tiny import WithoutAModel, _without_a_model
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
