"""docs/bert_and_t5.md: its Python block runs; test_commands runs its commands."""

import csv

from tests.docs.pages import python_blocks


def test_the_block_writes_passages_of_the_standard_library_and_their_packages(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [source] = python_blocks("bert_and_t5.md")
    exec(compile(source, "docs/bert_and_t5.md", "exec"), {})
    labels = {}
    for name in ("train", "held_out"):
        with (tmp_path / f"{name}.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        labels[name] = {row["label"] for row in rows}
        assert all(row["text"].count("\n") == 9 for row in rows)
    assert len(labels["train"]) == 8
    assert labels["held_out"] <= labels["train"]
