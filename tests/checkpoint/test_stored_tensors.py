"""checkpoint/stored_tensors: parts of tensors that are stored transposed or packed; tensors written one by one."""

import weakref

import pytest
import torch
from safetensors.torch import save_file

from megalith.checkpoint import load_tensors, save_checkpoint
from megalith.checkpoint.box import Box
from megalith.checkpoint.index import Piece, StoredTensor
from megalith.checkpoint.stored_tensors import StoredTensors
from megalith.errors import CheckpointError
from megalith.storage import LocalStore

PARTS = [((0, 4), (0, 5)), ((1, 3), (2, 5)), ((3, 4), (0, 5)), ((0, 4), (4, 5))]


@pytest.fixture
def stored(tmp_path):
    """Thirds of a packed matrix, plain and transposed; also returns the matrix [12, 5]."""
    whole = torch.arange(60.0).reshape(12, 5)
    save_file({"plain": whole, "turned": whole.t().contiguous()}, tmp_path / "x.safetensors")
    tensors = {}
    for key, dims in (("plain", None), ("turned", (1, 0))):
        for third in range(3):
            box = Box(((-4 * third, 12 - 4 * third), (0, 5)))
            piece = Piece("x.safetensors", key, box, dims)
            tensors[f"{key} {third}"] = StoredTensor((4, 5), "float32", (piece,))
    return StoredTensors(LocalStore(tmp_path), tensors), whole


@pytest.mark.parametrize("block", [1, 24, 8 << 20])
@pytest.mark.parametrize("key", ["plain", "turned"])
def test_a_box_of_a_packed_or_transposed_tensor_is_its_slice(stored, key, block, monkeypatch):
    monkeypatch.setattr("megalith.checkpoint.shard_file._BLOCK", block)
    tensors, whole = stored
    for third in range(3):
        want = whole[4 * third : 4 * third + 4]
        assert tensors.read(f"{key} {third}").equal(want)
        for ranges in PARTS:
            box = Box(ranges)
            into = torch.zeros(box.shape, dtype=torch.float64)
            tensors.fill({f"{key} {third}": (box, into)})
            assert into.equal(want[tuple(slice(*ends) for ends in ranges)].double())


def test_a_file_that_has_another_shape_than_the_index_says_is_refused(stored):
    tensors, _ = stored
    piece = Piece("x.safetensors", "plain", Box(((0, 5), (0, 12))))
    wrong = StoredTensors(tensors.store, {"w": StoredTensor((5, 12), "float32", (piece,))})
    with pytest.raises(CheckpointError, match=r"x\.safetensors: plain must be F32 \[5, 12\] according to the index"):
        wrong.read("w")


def test_tensors_that_are_read_when_they_are_written_are_in_memory_one_at_a_time(tmp_path):
    alive = weakref.WeakSet()
    most = 0

    def read(name):
        nonlocal most
        tensor = torch.full((1000,), float(name))
        alive.add(tensor.untyped_storage())
        most = max(most, len(alive))
        return tensor

    described = {str(number): torch.empty(1000, device="meta") for number in range(5)}
    path = save_checkpoint(tmp_path, 0, described, {}, keep_last=1, read=read)
    assert most == 1
    into = {name: torch.zeros(1000) for name in described}
    load_tensors(path, into)
    assert all(tensor.eq(float(name)).all() for name, tensor in into.items())
