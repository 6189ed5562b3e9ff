"""Loading is strict: all mismatches are reported at once, and nothing is changed."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megalith.checkpoint import load_tensors, save_checkpoint
from megalith.checkpoint.shard_file import ShardFile
from megalith.errors import CheckpointError, StorageError
from megalith.storage.manifest import manifest_of, record_of
from tests.rank_pool import ranks

SAVED = {
    "model.q_proj.weight": torch.randn(4, 3),
    "model.norm.weight": torch.randn(5, dtype=torch.bfloat16),
    "optimizer.exp_avg.model.norm.weight": torch.randn(5),
    "optimizer.step": torch.tensor(3),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("run"), 1, SAVED, {}, keep_last=1)


def empty(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in SAVED.items()} | changes


def test_everything_that_does_not_fit_is_in_one_error_and_nothing_changes(checkpoint):
    into = empty()
    into["model.qproj.weight"] = into.pop("model.q_proj.weight")
    into["zzz"] = torch.zeros(1)
    into["model.norm.weight"] = torch.zeros(6, dtype=torch.bfloat16)
    into["optimizer.step"] = torch.zeros(())
    with pytest.raises(CheckpointError) as caught:
        load_tensors(checkpoint, into)
    assert str(caught.value).splitlines() == [
        f"{checkpoint} does not match the tensors to load, and nothing was loaded:",
        "  missing: model.qproj.weight (closest name in the checkpoint: model.q_proj.weight)",
        "  missing: zzz",
        "  unexpected: model.q_proj.weight",
        "  model.norm.weight: expected shape [6], but the checkpoint has [5]",
        "  optimizer.step: expected torch.float32, but the checkpoint has torch.int64",
        "if it was saved by a model of a different shape or dtype, use the settings of the run that saved it",
    ]
    assert all(tensor.eq(0).all() for tensor in into.values())


def test_a_part_of_the_names_can_be_all_that_counts(checkpoint):
    weights = {name: tensor for name, tensor in empty().items() if name.startswith("model.")}
    with pytest.raises(CheckpointError, match=r"unexpected: optimizer\.step"):
        load_tensors(checkpoint, weights)
    load_tensors(checkpoint, weights, only=lambda name: name.startswith("model."))
    for name, tensor in weights.items():
        assert tensor.equal(SAVED[name])
    with pytest.raises(CheckpointError, match=r"missing: optimizer\.step"):
        load_tensors(checkpoint, empty(), only=lambda name: name != "optimizer.step")


def test_another_dtype_is_refused_unless_a_cast_between_floats_is_asked_for(checkpoint):
    wide = empty(**{"model.norm.weight": torch.zeros(5), "model.q_proj.weight": torch.zeros(4, 3).bfloat16()})
    with pytest.raises(
        CheckpointError, match=r"model\.norm\.weight: expected torch\.float32, but the checkpoint has torch\.bfloat16"
    ):
        load_tensors(checkpoint, wide)
    load_tensors(checkpoint, wide, cast=True)
    assert wide["model.norm.weight"].equal(SAVED["model.norm.weight"].float())
    assert wide["model.q_proj.weight"].equal(SAVED["model.q_proj.weight"].bfloat16())
    with pytest.raises(
        CheckpointError, match=r"optimizer\.step: expected torch\.float32, but the checkpoint has torch\.int64"
    ):
        load_tensors(checkpoint, empty(**{"optimizer.step": torch.zeros(())}), cast=True)


def test_tensors_are_filled_in_place_whatever_their_strides_and_gradients(checkpoint):
    storage = torch.zeros(3, 8)
    weight = storage[:, ::2].t()
    parameter = torch.nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
    load_tensors(checkpoint, empty(**{"model.q_proj.weight": weight, "model.norm.weight": parameter}))
    assert storage[:, ::2].t().equal(SAVED["model.q_proj.weight"])
    assert storage[:, 1::2].eq(0).all()
    assert parameter.equal(SAVED["model.norm.weight"])
    assert parameter.is_leaf
    assert parameter.grad is None


def test_a_caller_that_has_verified_does_not_pay_twice(checkpoint, monkeypatch):
    def again(_):
        pytest.fail("verified again")

    monkeypatch.setattr("megalith.checkpoint.load.verify_checkpoint", again)
    into = empty()
    load_tensors(checkpoint, into, verify=False)
    assert into["optimizer.step"].item() == 3


def load_on_stages(path: Path) -> list[str]:
    """Rank 0 has some of the names and rank 1 the others, like stages of a pipeline."""
    names = [name for name in SAVED if name.startswith("model.") == (dist.get_rank() == 0)]
    into = {name: torch.zeros_like(SAVED[name]) for name in names}
    load_tensors(path, into)
    # the names of one rank alone do not match the checkpoint
    del into[names[0]]
    with pytest.raises(CheckpointError) as caught:
        load_tensors(path, into)
    return [line.strip() for line in str(caught.value).splitlines()[1:-1]]


def test_names_count_as_wanted_if_any_rank_wants_them(checkpoint):
    wanted = ["unexpected: model.q_proj.weight", "unexpected: optimizer.exp_avg.model.norm.weight"]
    assert ranks(2, load_on_stages, checkpoint) == [wanted] * 2


def misfit_on_rank_1(path: Path) -> str:
    into = empty()
    if dist.get_rank() == 1:
        into["model.norm.weight"] = torch.zeros(7, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError) as caught:
        load_tensors(path, into)
    return str(caught.value)


def test_a_misfit_on_one_rank_is_the_error_of_all(checkpoint):
    first, second = ranks(2, misfit_on_rank_1, checkpoint)
    assert first == second
    assert "model.norm.weight: expected shape [7], but the checkpoint has [5]" in first


def failing_read_on_rank_1(folder: Path) -> str:
    full = torch.arange(8.0)
    tensor = distribute_tensor(full, init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)
    path = save_checkpoint(folder, 1, {"w": tensor}, {}, keep_last=1)
    dist.barrier()
    if dist.get_rank() == 1:
        (path / "shard-00001-of-00002.safetensors").unlink()
    dist.barrier()
    with pytest.raises(StorageError) as caught:
        load_tensors(path, {"w": tensor}, verify=False)
    return str(caught.value)


def test_a_read_that_fails_on_one_rank_is_an_error_on_both(tmp_path):
    first, second = ranks(2, failing_read_on_rank_1, tmp_path)
    assert first == second
    assert "step-00000001 cannot be loaded: rank 1: cannot read " in first
    assert "shard-00001-of-00002.safetensors: No such file or directory" in first


def read_parts(folder: Path) -> list[str]:
    """What a rank reads, as (key, ranges), for one of four row blocks, saved as quarters by rows and columns."""
    full = torch.arange(12.0).reshape(4, 3)
    mesh = init_device_mesh("cpu", (2, 2))
    path = save_checkpoint(folder, 1, {"w": distribute_tensor(full, mesh, [Shard(0), Shard(1)])}, {}, keep_last=1)
    into = distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0), Shard(0)])
    opened = []

    read_part = ShardFile.read_part

    def read(file, key, box, part, dtype, into, **how):
        opened.append((key, part.ranges))
        read_part(file, key, box, part, dtype, into, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardFile, "read_part", read)
        load_tensors(path, {"w": into})
    assert into.full_tensor().equal(full)
    return opened


def test_a_rank_reads_only_what_overlaps_its_own_part(tmp_path):
    opened = ranks(4, read_parts, tmp_path)
    assert opened[2] == [("w@2:4,0:2", ((2, 3), (0, 2))), ("w@2:4,2:3", ((2, 3), (2, 3)))]
    assert sum(map(len, opened)) == 8


def crafted(folder: Path, boxes: list[list[list[int]]]) -> Path:
    """A checkpoint of one tensor [4, 2] in these boxes, with valid hashes."""
    path = folder / "step-00000001"
    path.mkdir(parents=True)
    keys = [f"w@{number}" for number in range(len(boxes))]
    shapes = [tuple(stop - start for start, stop in ranges) for ranges in boxes]
    save_file({key: torch.ones(shape) for key, shape in zip(keys, shapes, strict=True)}, path / "shard.safetensors")
    pieces = [{"file": "shard.safetensors", "key": key, "ranges": r} for key, r in zip(keys, boxes, strict=True)]
    index = {"tensors": {"w": {"shape": [4, 2], "dtype": "float32", "boxes": pieces}}}
    (path / "index.json").write_text(json.dumps(index))
    (path / "state.json").write_text("{}")
    files = {file.name: record_of([file.read_bytes()]) for file in path.iterdir()}
    (path / "manifest.json").write_bytes(manifest_of(files))
    return path


def test_boxes_that_overlap_and_leave_a_gap_as_large_are_refused(tmp_path):
    into = {"w": torch.zeros(4, 2)}
    load_tensors(crafted(tmp_path / "sound", [[[0, 2], [0, 2]], [[2, 4], [0, 2]]]), into)
    assert (into["w"] == 1.0).all()
    path = crafted(tmp_path / "crafted", [[[0, 2], [0, 2]], [[1, 3], [0, 2]]])
    into = {"w": torch.zeros(4, 2)}
    with pytest.raises(CheckpointError, match=r"list each element of w in exactly one box; \[1, 0\] is in 2"):
        load_tensors(path, into)
    assert (into["w"] == 0.0).all()
