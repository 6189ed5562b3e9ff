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
        ({"a": entry(0, 8)}, 7, "its tensors end at byte .*, and the file at"),
        ({"a": entry(0, 8)}, 9, "its tensors end at byte .*, and the file at"),
        ({"a": entry(0, 8), "b": entry(12, 20)}, 20, "b must begin at byte .*, where the one before ends"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "b must begin at byte .*, where the one before ends"),
        ({"a": entry(0, 8, shape=[3])}, 8, r"a is F32 \[3\] and cannot take the 8 bytes"),
        ({"a": entry(8, 0)}, 8, r"a is F32 \[2\] and cannot take the -8 bytes"),
        ({"a": entry(-8, 0)}, 8, "integers from 0 on; got -8"),
        ({"a": entry(0, 8, shape=[-1, -2])}, 8, "integers from 0 on; got -1"),
        ({"a": entry(0, 8, shape=[2.0])}, 8, "integers from 0 on; got 2.0"),
        ({"a": entry(0, 4, shape=[True])}, 4, "integers from 0 on; got True"),
        ({"a": entry(0, 8, dtype="F31")}, 8, "a must be one of F64, .*; it is F31"),
        ({"a": entry(0, 8, dtype=["F32"])}, 8, "unhashable"),
        ({"a": entry(0, 8, more=1)}, 8, "unexpected keyword"),
        ({"a": {"dtype": "F32", "shape": [2]}}, 8, "data_offsets"),
        ({"a": 1}, 8, "its header is not that of a safetensors file"),
        ({"__metadata__": {"format": 1}, "a": entry(0, 8)}, 8, "value of __metadata__, must be text"),
        ([], 0, "it begins with b'\\['"),
    ],
)
def test_entries_that_do_not_fit_the_file_are_refused(tmp_path, entries, num_bytes, message):
    text = refusal(tmp_path, file_of(json.dumps(entries), num_bytes))
    assert re.search(message, text), text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "begins with 8 bytes of length; it has 0"),
        (b"1234567", "begins with 8 bytes of length; it has 7"),
        ((100).to_bytes(8, "little") + b"{}", "should take 100 bytes; the file has 10"),
        (b"\xff" * 8 + b"{}", "should take 18,446,744,073,709,551,615 bytes"),
        (file_of(' {"a": 1}', 0), "it begins with b' '"),
        (file_of('{"a": ', 0), "its header is not that of a safetensors file"),
        (file_of('{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}, "a": {}}', 0), "a key is there twice"),
        (file_of('{"a":' * 100_000, 0), "its header is not that of a safetensors file"),
    ],
)
def test_what_is_no_header_is_refused(tmp_path, content, message):
    assert message in refusal(tmp_path, content)


# one MB each: a header of the longest, 32 MB, takes as many times its size
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


@pytest.mark.parametrize("name", HOSTILE)
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
    assert peak < 7.9 * len(content)  # 256 MB of a header of 32


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a" 1}', "byte 5 must be :; it is b'1'"),
        ('{"a": {"dtype": 1', "must be an object of at most 1024 bytes"),
        ('{"__metadata__": {"a\\"}}', "has no end"),
        ('{"__metadata__": {}} x', "something follows the object, at byte 21"),
        ('{"__metadata__": {},}', "must be text; byte 20"),
        ('{"a": {"dtype":"U8","shape":[0],"data_offsets":[0,0]} "b"', "must be , or }"),
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
