"""A header is believed only if every byte of the file belongs to exactly one tensor."""

import json
import re
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megalith.checkpoint.shard_header import ShardEntry, read_header
from megalith.errors import CheckpointError
from megalith.storage import LocalStore

NAME = "x.safetensors"


def entry(begin: int, end: int, shape: object = (2,), dtype: object = "F32", **more: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end], **more}


def refusal(folder: Path, content: bytes) -> str:
    (folder / NAME).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_header(LocalStore(folder), NAME)
    return str(caught.value)


def file_of(header: str, num_bytes: int) -> bytes:
    return len(header).to_bytes(8, "little") + header.encode() + bytes(num_bytes)


def test_a_file_of_the_library_is_read(tmp_path):
    save_file({"a": torch.ones(2, 3), "none": torch.ones(0)}, tmp_path / NAME, metadata={"format": "pt"})
    entries = read_header(LocalStore(tmp_path), NAME)
    size = (tmp_path / NAME).stat().st_size
    assert entries["a"] == ShardEntry("F32", (2, 3), size - 24, size)
    assert entries["none"].shape == (0,)


@pytest.mark.parametrize(
    ("entries", "num_bytes", "message"),
    [
        ({"a": entry(0, 8)}, 7, "the tensors end at byte .*, but the file ends at"),
        ({"a": entry(0, 8)}, 9, "the tensors end at byte .*, but the file ends at"),
        ({"a": entry(0, 8), "b": entry(12, 20)}, 20, "b must begin at byte .*, without gap or overlap"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "b must begin at byte .*, without gap or overlap"),
        ({"a": entry(0, 8, shape=[3])}, 8, r"a: data_offsets span 8 bytes, which does not match F32 \[3\]"),
        ({"a": entry(8, 0)}, 8, r"a: data_offsets span -8 bytes, which does not match F32 \[2\]"),
        ({"a": entry(-8, 0)}, 8, "non-negative integers; got -8"),
        ({"a": entry(0, 8, shape=[-1, -2])}, 8, "non-negative integers; got -1"),
        ({"a": entry(0, 8, shape=[2.0])}, 8, "non-negative integers; got 2.0"),
        ({"a": entry(0, 4, shape=[True])}, 4, "non-negative integers; got True"),
        ({"a": entry(0, 8, dtype="F31")}, 8, "a: dtype must be one of F64, .*; got F31"),
        ({"a": entry(0, 8, dtype=["F32"])}, 8, "unhashable"),
        ({"a": entry(0, 8, more=1)}, 8, "unexpected keyword"),
        ({"a": {"dtype": "F32", "shape": [2]}}, 8, "data_offsets"),
        ({"a": 1}, 8, "invalid safetensors header"),
        ({"__metadata__": {"format": 1}, "a": entry(0, 8)}, 8, "values of __metadata__ must be strings"),
        ([], 0, "it must begin with '{'; got b'\\['"),
    ],
)
def test_entries_that_do_not_fit_the_file_are_refused(tmp_path, entries, num_bytes, message):
    text = refusal(tmp_path, file_of(json.dumps(entries), num_bytes))
    assert re.search(message, text), text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "8-byte header length; the file has 0"),
        (b"1234567", "8-byte header length; the file has 7"),
        (
            (100).to_bytes(8, "little") + b"{}",
            "must fit in the file (10 bytes) and have at most 33,554,432 bytes, enough for 250,000 tensors; got 100",
        ),
        (b"\xff" * 8 + b"{}", "tensors; got 18,446,744,073,709,551,615"),
        (file_of(' {"a": 1}', 0), "it must begin with '{'; got b' '"),
        (file_of('{"a": ', 0), "invalid safetensors header"),
        (file_of('{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}, "a": {}}', 0), "duplicate key"),
        (file_of('{"a":' * 100_000, 0), "invalid safetensors header"),
    ],
)
def test_what_is_no_header_is_refused(tmp_path, content, message):
    assert message in refusal(tmp_path, content)


# 1 MB each; a header of the maximum size, 32 MB, takes the same multiple of its size
HOSTILE = {
    "lists": '{"a": {"dtype": [' + "[]," * 350_000 + "[]]}}",
    "lists in place of an entry": '{"a": [' + "[]," * 350_000 + "[]]}",
    "objects": '{"a": [' + '{"":0},' * 150_000 + "{}]}",
    "metadata": '{"__metadata__": {' + ",".join(f'"{n}":""' for n in range(90_000)) + "}}",
    "a long key": '{"' + "k" * 1_000_000 + '": 1}',
    "a wide sign in a long key": '{"' + "k" * 1_000_000 + '\U0001f600": 1}',
    "tensors of nothing": "{"
    + ",".join(f'"{n}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for n in range(19_000))
    + "}",
}


@pytest.mark.parametrize(  # one of them takes many seconds
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "metadata" else []) for name in HOSTILE]
)
def test_a_header_takes_little_more_memory_than_its_tensors(name, tmp_path):
    content = file_of(HOSTILE[name], 0)
    (tmp_path / NAME).write_bytes(content)
    tracemalloc.start()
    try:
        read_header(LocalStore(tmp_path), NAME)
    except CheckpointError:
        assert name not in ("metadata", "tensors of nothing")
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 7.9 * len(content)  # 256 MB for a header of 32


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a" 1}', "expected : at byte 5; got b'1'"),
        ('{"a": {"dtype": 1', "must be an object of at most 1024 bytes"),
        ('{"__metadata__": {"a\\"}}', "unterminated string"),
        ('{"__metadata__": {}} x', "unexpected content after the object, at byte 21"),
        ('{"__metadata__": {},}', "must be strings; byte 20"),
        ('{"a": {"dtype":"U8","shape":[0],"data_offsets":[0,0]} "b"', "expected , or }"),
    ],
)
def test_what_is_no_json_object_is_refused_where_it_ends_to_be_one(text, message, tmp_path):
    assert re.search(message, refusal(tmp_path, file_of(text, 0)))


def test_keys_and_metadata_are_those_of_json(tmp_path):
    key, metadata = 'a "quoted" \\ key, in {braces}: \u00fc\U0001f600', {"}": '"', "\\": '\\"', "": "{}"}
    save_file({key: torch.ones(2)}, tmp_path / NAME, metadata=metadata)
    assert read_header(LocalStore(tmp_path), NAME).keys() == {key}
    spaced = json.dumps({"__metadata__": metadata, key: entry(0, 8)}, indent=2) + "   "
    (tmp_path / NAME).write_bytes(file_of(spaced, 8))
    assert read_header(LocalStore(tmp_path), NAME)[key].shape == (2,)
