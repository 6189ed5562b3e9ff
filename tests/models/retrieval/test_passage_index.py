"""An index on disk: what was written is read back, in parts, and anything else is one error."""

import json
import os
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from megalith.errors import ConfigError, DataError, ShapeError, StorageError
from megalith.models.retrieval import write_index as write_index_module
from megalith.models.retrieval.passage_index import Passage, PassageIndex, index_file_of
from megalith.models.retrieval.write_index import write_index
from tests.models.retrieval.indexes import embeddings, made

FILES = ["embeddings-00000.safetensors", "offsets.safetensors", "passage_index.json", "passages.jsonl"]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("num_rows", [1, 3, 7, 100])
def test_blocks_are_the_embeddings_in_order(num_rows, dtype, tmp_path):
    given = embeddings(23)
    index = made(tmp_path / "index", given, dtype)
    found = [(first, block.clone()) for first, block in index.blocks(num_rows, torch.float64)]
    assert torch.equal(torch.cat([block for _, block in found]), given.to(getattr(torch, dtype)).double())
    at = 0
    for first, block in found:
        assert (first, len(block) <= num_rows) == (at, True)
        at += len(block)
    assert (index.num_passages, index.embedding_size, index.dtype) == (23, 8, dtype)


def test_the_files_are_those_of_the_formats_that_they_name(tmp_path):
    given = embeddings(16)
    made(tmp_path / "index", given)
    names = sorted(os.listdir(tmp_path / "index"))
    assert names == sorted([*FILES, "embeddings-00001.safetensors", "embeddings-00002.safetensors"])
    shards = [load_file(tmp_path / "index" / f"embeddings-{number:05}.safetensors") for number in range(3)]
    assert [len(shard["embeddings"]) for shard in shards] == [7, 7, 2]
    assert torch.equal(torch.cat([shard["embeddings"] for shard in shards]), given)
    lines = (tmp_path / "index" / "passages.jsonl").read_bytes().splitlines(keepends=True)
    assert json.loads(lines[4]) == {"text": "text 4, über", "source": "1.jsonl", "document": 4}
    [offsets] = load_file(tmp_path / "index" / "offsets.safetensors").values()
    assert offsets.tolist() == [sum(map(len, lines[:number])) for number in range(17)]


def test_texts_are_found_by_id(tmp_path):
    index = made(tmp_path / "index", embeddings(20))
    want = [Passage(f"text {number}, über", f"{number % 3}.jsonl", number) for number in (19, 0, 7, 7)]
    assert index.passages([19, 0, 7, 7]) == want
    for outside in (-1, 20):
        with pytest.raises(IndexError, match=f"numbered 0 to 19; got {outside}"):
            index.passages([outside])


def test_a_copy_elsewhere_is_the_same_index(tmp_path):
    index = made(tmp_path / "index", embeddings(20))
    index.store.path.rename(tmp_path / "other")
    other = PassageIndex.open(tmp_path / "other")
    other.verify()
    assert (
        (other.model, other.files)
        == (index.model, index.files)
        == ({"path": "somewhere", "seq_length": 32}, index.files)
    )


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_or_missing_file_is_an_error_that_names_it(name, tmp_path):
    made(tmp_path / "index", embeddings(5))
    path = tmp_path / "index" / name
    path.write_bytes(path.read_bytes()[:-1])
    PassageIndex.open(tmp_path / "index") if name == "passage_index.json" else None  # its last byte is a line end
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=rf"{name} is damaged.*make it again"):
        PassageIndex.open(tmp_path / "index")
    path.unlink()
    with pytest.raises(DataError, match=name):
        PassageIndex.open(tmp_path / "index")


@pytest.mark.parametrize("name", [name for name in FILES if name != "passage_index.json"])
def test_every_flipped_byte_is_found(name, tmp_path):
    index = made(tmp_path / "index", embeddings(5))
    index.verify()
    path = tmp_path / "index" / name
    sound = path.read_bytes()
    for place in range(0, len(sound), 13):
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
        with pytest.raises(DataError, match=f"{name} is damaged: its content is not what was written"):
            PassageIndex.open(tmp_path / "index").verify()


def test_no_flipped_byte_of_the_table_is_taken_for_another_index(tmp_path):
    index = made(tmp_path / "index", embeddings(5))
    path = tmp_path / "index" / "passage_index.json"
    sound = path.read_bytes()
    for place in range(len(sound)):
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
        try:
            assert PassageIndex.open(tmp_path / "index") == index  # white space
        except DataError as error:
            assert "passage_index.json" in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"null", b'{"format": 1}', b"\xff", b"[" * 10**5, b'{"format": "megalith checkpoint", "version": 1}'],
)
def test_a_foreign_table_is_an_error(content, tmp_path):
    (tmp_path / "passage_index.json").write_bytes(content)
    with pytest.raises(DataError, match=r"passage_index.json (is damaged|must have format)"):
        PassageIndex.open(tmp_path)


@pytest.mark.parametrize("fields", [{"bytes": "12"}, {"bytes": None}, {"bytes": 1.5}, {"sha256": 5}])
def test_a_file_of_unknown_size_is_an_error(fields, tmp_path):
    index = made(tmp_path / "index", embeddings(5))
    files = {**index.files, "passages.jsonl": replace(index.files["passages.jsonl"], **fields)}
    (tmp_path / "index" / "passage_index.json").write_bytes(index_file_of(replace(index, files=files)))
    with pytest.raises(DataError, match=r"index\.json is damaged: its files must have bytes, .*passages\.jsonl"):
        PassageIndex.open(tmp_path / "index")


def test_a_table_that_does_not_list_every_file_of_embeddings_is_an_error(tmp_path):
    index = made(tmp_path / "index", embeddings(16))
    files = {name: record for name, record in index.files.items() if name != "embeddings-00001.safetensors"}
    (tmp_path / "index" / "passage_index.json").write_bytes(index_file_of(replace(index, files=files)))
    with pytest.raises(DataError, match=r"it must list one file for every 7 of 16 passages"):
        PassageIndex.open(tmp_path / "index")


def test_more_passages_than_ids_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(write_index_module, "_MOST_PASSAGES", 4)
    with pytest.raises(DataError, match="at most 4 passages; make several indexes"):
        made(tmp_path / "index", embeddings(5))


def test_a_folder_without_an_index_is_an_error_that_says_how_to_make_one(tmp_path):
    with pytest.raises(DataError, match=r"must be an index of passages; it has no passage_index\.json; make one with"):
        PassageIndex.open(tmp_path)


def test_offsets_that_lead_elsewhere_are_an_error(tmp_path):
    index = made(tmp_path / "index", embeddings(5))
    path = tmp_path / "index" / "offsets.safetensors"
    path.write_bytes(path.read_bytes()[:-8] + (1 << 40).to_bytes(8, "little"))
    with pytest.raises(DataError, match="passage 4 has no text"):
        index.passages([4])
    path.write_bytes(path.read_bytes()[:-8] + (10**9).to_bytes(8, "little"))
    with pytest.raises(DataError, match="passage 4 has no text"):
        index.passages([4])


def test_an_existing_folder_is_not_touched_and_nothing_is_embedded(tmp_path):
    def batches():
        raise AssertionError("nothing may be computed")
        yield

    (tmp_path / "index").mkdir()
    with pytest.raises(StorageError, match="already exists"):
        write_index(tmp_path / "index", batches(), dtype="float16", model={})
    assert os.listdir(tmp_path / "index") == []


def test_a_failure_in_the_middle_leaves_nothing(tmp_path):
    def batches():
        yield embeddings(5), [Passage("a", "b", 0)] * 5
        raise DataError("the next file cannot be read")

    with pytest.raises(DataError, match="the next file"):
        write_index(tmp_path / "index", batches(), dtype="float16", model={})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("given", "dtype", "error", "says"),
    [
        (torch.tensor([[1.0], [7e4]]), "float16", ConfigError, "that of passage 1 is not .*70000.*in float32"),
        (torch.tensor([[float("nan")]]), "float32", ConfigError, "that of passage 0 is not .*check the model"),
        (torch.ones(1, 2), "bfloat16", ConfigError, "float16 or float32; got 'bfloat16'"),
        (torch.ones(2), "float16", ShapeError, "must be .n, D."),
        (torch.ones(0, 2), "float16", DataError, "at least one passage"),
    ],
)
def test_what_cannot_be_stored_is_refused(given, dtype, error, says, tmp_path):
    with pytest.raises(error, match=says):
        write_index(tmp_path / "index", [(given, [Passage("a", "b", 0)] * len(given))], dtype=dtype, model={})
    assert os.listdir(tmp_path) == []


def test_embeddings_of_another_size_are_refused(tmp_path):
    one = [Passage("a", "b", 0)]
    with pytest.raises(ShapeError, match="same size; got 3 after 2"):
        write_index(tmp_path / "i", [(torch.ones(1, 2), one), (torch.ones(1, 3), one)], dtype="float16", model={})
    with pytest.raises(ShapeError, match=r"got \[2, 2\] of 1"):
        write_index(tmp_path / "i", [(torch.ones(2, 2), one)], dtype="float16", model={})
