"""Our files are valid safetensors files, according to the specification and to its library."""

import hashlib
import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megalith.checkpoint.box import Box
from megalith.checkpoint.shard_file import ShardFile, write_shard
from megalith.checkpoint.shard_header import DTYPES
from megalith.errors import CheckpointError, StorageError
from megalith.storage import LocalStore, record_of


def test_the_bytes_are_those_that_the_format_describes(tmp_path):
    path = tmp_path / "x.safetensors"
    write_shard(
        LocalStore(tmp_path),
        "x.safetensors",
        {"b": torch.tensor([[1, 2], [3, 4]], dtype=torch.int16), "a": torch.tensor(-1.5)},
    )
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    assert json.loads(content[8 : 8 + length]) == {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
        "b": {"dtype": "I16", "shape": [2, 2], "data_offsets": [4, 12]},
    }
    assert length % 8 == 0
    assert content[8 + length :] == struct.pack("<f", -1.5) + struct.pack("<4h", 1, 2, 3, 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_library_reads_every_dtype_as_it_was(tmp_path, dtype):
    bits = torch.randint(2, (24,), dtype=torch.uint8).view(getattr(torch, dtype))
    tensors = {"x": bits, "strided": bits.repeat(6).view(2, -1).t(), "empty": bits[:0].view(0, 3), "scalar": bits[0]}
    write_shard(LocalStore(tmp_path), "x.safetensors", tensors)
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert loaded[name].reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))


def test_the_record_is_that_of_the_file(tmp_path):
    record = write_shard(LocalStore(tmp_path), "x.safetensors", {"x": torch.ones(100_000)})
    assert record == record_of(LocalStore(tmp_path).parts("x.safetensors"))
    assert record.sha256 == hashlib.sha256((tmp_path / "x.safetensors").read_bytes()).hexdigest()


def test_a_file_is_on_disk_when_it_is_written(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("os.fsync", lambda file: synced.append(Path(f"/proc/self/fd/{file}").stat().st_size))
    record = write_shard(LocalStore(tmp_path), "x.safetensors", {"x": torch.ones(10)})
    assert synced == [record.bytes]


def test_a_full_disk_is_a_storage_error():
    with pytest.raises(StorageError, match="cannot write /dev/full: No space left on device"):
        write_shard(LocalStore(Path("/dev")), "full", {"x": torch.ones(10)})


def test_a_part_of_a_box_is_read(tmp_path):
    full = torch.arange(60.0).view(6, 10)
    save_file({"w@2:6,5:10": full[2:6, 5:10].contiguous()}, tmp_path / "x.safetensors")
    box, part = Box(((2, 6), (5, 10))), Box(((3, 5), (6, 10)))
    file = ShardFile(LocalStore(tmp_path), "x.safetensors")
    for into in (torch.zeros(2, 4), torch.zeros(4, 2, dtype=torch.float64).t()):
        file.read_part("w@2:6,5:10", box, part, "float32", into)
        assert into.equal(full[3:5, 6:10].to(into.dtype))
    with pytest.raises(
        CheckpointError, match=r"must be F64 \[4, 5\] according to the index; the file has F32 \[4, 5\]"
    ):
        file.read_part("w@2:6,5:10", box, part, "float64", torch.zeros(2, 4))
    with pytest.raises(
        CheckpointError, match=r"must be F32 \[2, 4\] according to the index; the file has F32 \[4, 5\]"
    ):
        file.read_part("w@2:6,5:10", part, part, "float32", torch.zeros(2, 4))
    with pytest.raises(CheckpointError, match="tensor w is not in the file"):
        file.read_part("w", box, part, "float32", torch.zeros(2, 4))
