"""Token ids and the vocabulary: checked by the sidecar, by a scan, and when a sample is read."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalith.data import token_ids
from megalith.data.gpt_dataset import EvaluationDataset, GPTDataset
from megalith.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megalith.data.token_ids import check_dataset
from megalith.errors import DataError

DOCUMENTS = [[1, 2, 3], [4, 61, 5], [6, 7, 60, 2]]


def written(prefix: Path, documents: Any = DOCUMENTS, dtype: str = "int32", *, recorded: bool = True) -> IndexedDataset:
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for document in documents:
            builder.add_document(document)
        builder.finalize()
    if not recorded:
        prefix.with_suffix(".json").unlink()
    return IndexedDataset(prefix)


def test_the_builder_records_the_smallest_and_the_largest_id(tmp_path):
    dataset = written(tmp_path / "x", [[5, 2], [], [9]])
    assert dataset.sidecar.token_id_range == (2, 9)
    assert written(tmp_path / "empty", [[]]).sidecar.token_id_range is None
    assert written(tmp_path / "float", [[1.0]], "float32").sidecar.token_id_range is None
    with IndexedDatasetBuilder(tmp_path / "joined", "int32") as builder:
        builder.add_dataset(dataset)
        builder.add_document([11, 3])
        assert builder.finalize().token_id_range == (2, 11)


@pytest.mark.parametrize("recorded", [True, False])
def test_an_id_beyond_the_vocabulary_is_named_with_its_document_and_place(recorded, tmp_path):
    dataset = written(tmp_path / "x", recorded=recorded)
    assert check_dataset(dataset, 62).problem is None
    problem = check_dataset(dataset, 61).problem
    assert problem is not None
    assert problem.startswith(f"token 1 of document 1 in {tmp_path / 'x'} has id 61; token ids must be below 61")
    assert "model.vocab_size=62 or more" in problem


def test_a_negative_id_is_named_too(tmp_path):
    problem = check_dataset(written(tmp_path / "x", [[1, 2], [-3]]), 10).problem
    assert "token 0 of document 1" in problem
    assert "has id -3; token ids must be 0 or more" in problem


def test_tokens_that_are_no_whole_numbers_are_refused(tmp_path):
    problem = check_dataset(written(tmp_path / "x", [[1]], "f4"), 10).problem
    assert "has dtype float32; token ids must be integers" in problem


def test_nothing_is_read_where_the_sidecar_or_the_type_answers(tmp_path, monkeypatch):
    monkeypatch.setattr(token_ids, "spread_chunks", None)
    assert check_dataset(written(tmp_path / "x"), 62) == token_ids.TokenCheck()
    assert check_dataset(written(tmp_path / "y", dtype="uint8", recorded=False), 256) == token_ids.TokenCheck()


def test_a_scan_says_what_it_covers(tmp_path, monkeypatch):
    dataset = written(tmp_path / "x", [np.arange(60)], recorded=False)
    assert (
        "scanned all 60 tokens in 0.0 s; the largest id is 59, and the vocabulary size is 70"
        in check_dataset(dataset, 70).scanned
    )
    monkeypatch.setattr(token_ids, "_CHUNK", 4)
    monkeypatch.setattr(token_ids, "_NUM_CHUNKS", 3)
    assert [start for start, _ in token_ids.spread_chunks(dataset)] == [0, 28, 56]
    assert "scanned 12 (evenly spread) of 60 tokens" in check_dataset(dataset, 70).scanned


def test_a_recorded_id_that_the_scan_does_not_reach_is_named_without_its_place(tmp_path, monkeypatch):
    monkeypatch.setattr(token_ids, "_CHUNK", 1)
    monkeypatch.setattr(token_ids, "_NUM_CHUNKS", 2)  # the first token and the last
    assert check_dataset(written(tmp_path / "x"), 61).problem.startswith(f"{tmp_path / 'x'} contains token id 61; ")


def test_an_id_beyond_the_vocabulary_is_found_when_its_sample_is_read(tmp_path):
    dataset = written(tmp_path / "x")
    where = f"token 1 of document 1 in {tmp_path / 'x'} has id 61"
    [first] = [number for number in range(2) if 61 in GPTDataset(dataset, 9, 0)[number].tokens][:1]
    with pytest.raises(DataError, match=f"^sample {first} cannot be used: {where}"):
        GPTDataset(dataset, 9, 0, vocab_size=61)[first]
    with pytest.raises(DataError, match=f"^sample 1 cannot be used: {where}"):
        EvaluationDataset(dataset, 4, vocab_size=61)[1]
