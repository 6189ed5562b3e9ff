"""Saving: the expected files, the order in which they reach the disk, and failures that lose nothing."""

import errno
import json
import logging
import os
import re
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megalith.checkpoint import find_checkpoint, save_checkpoint, verify_checkpoint
from megalith.checkpoint.save import stage_checkpoint
from megalith.checkpoint.shard_file import write_shard
from megalith.errors import CheckpointError, StorageError
from megalith.storage import LocalStore, free_space
from tests.rank_pool import ranks


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_one_process_writes_one_plain_safetensors_file_and_json(tmp_path):
    tensors = {"model.w": torch.randn(3, 4), "optimizer.step": torch.tensor(7)}
    path = save_checkpoint(tmp_path / "checkpoints", 100, tensors, {"step": 100, "lr": 0.1}, keep_last=2)
    assert path == tmp_path / "checkpoints" / "step-00000100"
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000100\n"
    shard = "shard-00000-of-00001.safetensors"
    assert sorted(os.listdir(path)) == ["index.json", "manifest.json", shard, "state.json"]
    loaded = load_file(path / shard)
    assert loaded.keys() == tensors.keys()
    assert all(loaded[name].equal(tensors[name]) for name in tensors)
    assert json.loads((path / "state.json").read_text()) == {"step": 100, "lr": 0.1}
    boxes = [{"file": shard, "key": "model.w", "ranges": [[0, 3], [0, 4]]}]
    index = json.loads((path / "index.json").read_text())["tensors"]
    assert index["model.w"] == {"shape": [3, 4], "dtype": "float32", "boxes": boxes}
    assert index["optimizer.step"] == {
        "shape": [],
        "dtype": "int64",
        "boxes": [{"file": shard, "key": "optimizer.step", "ranges": []}],
    }
    files = json.loads((path / "manifest.json").read_text())["files"]
    assert {name: entry["bytes"] for name, entry in files.items()} == {
        name: (path / name).stat().st_size for name in ["index.json", shard, "state.json"]
    }


def save_sharded(folder: Path, step: int, num_rows: int, limit: int | None = None) -> str:
    """Two ranks save [num_rows, 2] float32, half each; on rank 1, no file may exceed ``limit`` bytes."""
    full = torch.arange(2.0 * num_rows).reshape(num_rows, 2)
    tensor = distribute_tensor(full, init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if limit is not None and dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        save_checkpoint(folder, step, {"w": tensor}, {"rank": dist.get_rank()}, keep_last=2)
    except (CheckpointError, StorageError) as error:
        return repr(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return "saved"


def test_each_rank_writes_its_box_under_the_name_with_its_ranges(tmp_path):
    assert ranks(2, save_sharded, tmp_path, 1, 5) == ["saved"] * 2
    first = load_file(tmp_path / "step-00000001" / "shard-00000-of-00002.safetensors")
    second = load_file(tmp_path / "step-00000001" / "shard-00001-of-00002.safetensors")
    assert first["w@0:3,0:2"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert second["w@3:5,0:2"].tolist() == [[6, 7], [8, 9]]
    assert json.loads((tmp_path / "step-00000001" / "state.json").read_text()) == {"rank": 0}


def test_a_rank_with_nothing_to_write_writes_no_file(tmp_path):
    assert ranks(2, save_sharded, tmp_path, 1, 1) == ["saved"] * 2
    assert not (tmp_path / "step-00000001" / "shard-00001-of-00002.safetensors").exists()
    verify_checkpoint(tmp_path / "step-00000001")


def test_a_full_disk_on_one_rank_is_an_error_on_both_and_loses_nothing(tmp_path):
    assert ranks(2, save_sharded, tmp_path, 1, 5) == ["saved"] * 2
    before = content_of(tmp_path)
    errors = ranks(2, save_sharded, tmp_path, 2, 100_000, limit=4096)
    assert errors[0] == errors[1]
    assert errors[0].startswith(
        "StorageError('step 2 was not saved and earlier checkpoints are unchanged: rank 1: cannot"
    )
    assert "shard-00001-of-00002.safetensors: File too large; raise the file size limit" in errors[0]
    assert content_of(tmp_path) == before
    assert ranks(2, save_sharded, tmp_path, 2, 100_000) == ["saved"] * 2  # continues once there is disk space


def raise_on_rank_1(folder: Path) -> str:
    state = {} if dist.get_rank() == 0 else {"not": "json"}
    tensor = torch.zeros(2 if dist.get_rank() == 0 else 3)
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(folder, 1, {"w": tensor}, state, keep_last=1)
    return str(caught.value)


def test_ranks_that_disagree_about_a_plain_tensor_are_refused(tmp_path):
    errors = ranks(2, raise_on_rank_1, tmp_path)
    assert errors[0] == errors[1]
    assert "w is float32 [2] on one rank and float32 [3] on rank 1; a tensor that differs" in errors[0]
    assert list(tmp_path.iterdir()) == []


def save_on_a_disk_of_its_own(folder: Path) -> str:
    """Rank 1 writes its file where rank 0 does not see it."""

    def write(staged, name, tensors, read):
        return write_shard(LocalStore(folder) if dist.get_rank() == 1 else staged, name, tensors, read)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megalith.checkpoint.save.write_shard", write)
        return save_sharded(folder / "checkpoints", 1, 5)


def test_machines_that_do_not_share_the_disk_are_told_so_and_nothing_is_published(tmp_path):
    errors = ranks(2, save_on_a_disk_of_its_own, tmp_path)
    assert errors[0] == errors[1]
    assert "shard-00001-of-00002.safetensors, but rank 0 sees no file; all machines must share the file" in errors[0]
    assert list((tmp_path / "checkpoints").iterdir()) == []


def save(folder: Path, step: int, value: float = 0.0, keep_last: int = 2) -> Path:
    return save_checkpoint(folder, step, {"w": torch.full((3,), value)}, {"step": step}, keep_last=keep_last)


def test_every_byte_is_on_disk_before_the_name_and_the_name_before_latest_and_removal(tmp_path, monkeypatch):
    save(tmp_path, 1)
    events = []

    def noted(function, describe):
        return lambda *args, **kwargs: events.append(describe(*args)) or function(*args, **kwargs)

    def name(path):
        return re.sub(r"^\.(.*)\.[0-9a-f]{32}\.tmp$", r"\1", os.path.basename(path))

    def name_of(descriptor):
        return name(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fsync", noted(os.fsync, lambda descriptor: f"fsync {name_of(descriptor)}"))
    monkeypatch.setattr(os, "rename", noted(os.rename, lambda _, to: f"rename {name(to)}"))
    monkeypatch.setattr(os, "replace", noted(os.replace, lambda _, to: f"rename {name(to)}"))
    save(tmp_path, 2, keep_last=1)
    assert events == [
        f"fsync {tmp_path.parent.name}",
        "fsync shard-00000-of-00001.safetensors",
        "fsync index.json",
        "rename index.json",
        "fsync .step-00000002.tmp",
        "fsync state.json",
        "rename state.json",
        "fsync .step-00000002.tmp",
        "fsync manifest.json",
        "rename manifest.json",
        "fsync .step-00000002.tmp",
        "fsync .step-00000002.tmp",
        "rename step-00000002",
        f"fsync {tmp_path.name}",
        "fsync latest",
        "rename latest",
        f"fsync {tmp_path.name}",
        "rename .step-00000001.tmp",  # while being removed
    ]
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000002"]


@pytest.mark.parametrize("target", ["step-00000002", "manifest.json", "index.json"])
def test_a_failing_rename_is_an_error_and_loses_nothing(tmp_path, monkeypatch, target):
    save(tmp_path, 1)
    before = content_of(tmp_path)

    def fail_on(function):
        def rename(source, to):
            if os.path.basename(to) == target:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            function(source, to)

        return rename

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail_on(os.rename))
        patch.setattr(os, "replace", fail_on(os.replace))
        with pytest.raises(StorageError, match=rf"step 2 was not saved.*cannot write .*{target}: Input/output error"):
            save(tmp_path, 2)
    assert content_of(tmp_path) == before
    assert find_checkpoint(tmp_path) == tmp_path / "step-00000001"
    assert save(tmp_path, 2) == find_checkpoint(tmp_path)


def test_a_latest_that_cannot_be_written_is_a_warning_for_the_checkpoint_stands(tmp_path, caplog):
    (tmp_path / "latest").mkdir()
    assert find_checkpoint(tmp_path) is None
    path = save(tmp_path, 1)
    assert find_checkpoint(tmp_path) == path
    assert "step-00000001 is saved, but cannot write" in caplog.text


def test_too_little_space_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(free_space, "free_bytes", lambda _: 11)
    with pytest.raises(StorageError, match=r"step 1 was not saved.* needs 0.0 kB, but its disk has only 0.0 kB left"):
        save(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(StorageError, match="expected a folder but found a file"):
        save(tmp_path / "checkpoints", 1)


def test_the_same_step_with_the_same_content_changes_nothing(tmp_path):
    save(tmp_path, 1)
    before = content_of(tmp_path)
    inode = (tmp_path / "step-00000001").stat().st_ino
    assert save(tmp_path, 1) == tmp_path / "step-00000001"
    assert content_of(tmp_path) == before
    assert (tmp_path / "step-00000001").stat().st_ino == inode


def test_the_same_step_with_other_content_is_refused_and_never_overwritten(tmp_path):
    save(tmp_path, 1)
    before = content_of(tmp_path)
    with pytest.raises(CheckpointError, match="step-00000001 already exists with different contents; use"):
        save(tmp_path, 1, value=3.0)
    assert content_of(tmp_path) == before


def test_an_incomplete_folder_of_the_step_is_set_aside(tmp_path, caplog):
    (save(tmp_path, 1) / "manifest.json").unlink()
    path = save(tmp_path, 1)
    verify_checkpoint(path)
    assert (tmp_path / "step-00000001.damaged" / "shard-00000-of-00001.safetensors").exists()
    assert "step-00000001 is damaged: it was renamed to step-00000001.damaged" in caplog.text


def test_leftovers_of_killed_saves_are_removed(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    for name in (".step-00000001.tmp", ".step-00000007.tmp", ".step-notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "shard").write_text("half")
    save(tmp_path, 1)
    assert sorted(os.listdir(tmp_path)) == [".step-notes", "latest", "step-00000001"]
    assert caplog.text.count("which a killed process left behind") == 2


@pytest.mark.parametrize(
    ("step", "state", "keep_last", "message"),
    [
        (1, {"x": torch.ones(1)}, 1, "the state must be JSON-serializable: Object of type Tensor is not"),
        (1, {}, 0, "keep_last at least 1; got step=1, keep_last=0"),
        (-1, {}, 1, "step must be at least 0"),
    ],
)
def test_arguments_that_cannot_be_saved_are_refused_before_anything_is_written(
    tmp_path, step, state, keep_last, message
):
    with pytest.raises(CheckpointError, match=message):
        save_checkpoint(tmp_path / "new", step, {"w": torch.ones(1)}, state, keep_last=keep_last)
    assert not (tmp_path / "new").exists()


def test_saving_leaves_the_tensors_and_their_graph_alone(tmp_path):
    weight = torch.ones(3, requires_grad=True)
    version = weight._version
    save_checkpoint(tmp_path, 1, {"w": weight}, {}, keep_last=1)
    assert weight._version == version
    assert weight.requires_grad


def test_a_checkpoint_that_lacks_the_file_of_a_writer_is_not_published(tmp_path):
    save_checkpoint(tmp_path, 1, {"w": torch.zeros(3)}, {}, keep_last=1)
    staged = stage_checkpoint(tmp_path, 2, {"w": torch.zeros(3)}, {}, keep_last=1)
    shard = "shard-00000-of-00001.safetensors"
    with pytest.raises(CheckpointError, match=f"the ranks must write {shard}; they have written nothing; all 1 that"):
        replace(staged, tensors={}).publish()
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000001"]
