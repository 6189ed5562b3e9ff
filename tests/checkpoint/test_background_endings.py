"""Endings of background saves: closed, given up, with an error, at the end of a script, without the default group."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megalith.checkpoint import BackgroundSaver, find_checkpoint, load_tensors, verify_checkpoint
from megalith.errors import StorageError
from megalith.storage import LocalStore
from tests.checkpoint.test_background import Saved, held_writing, tensors_of
from tests.rank_pool import ranks, renew_ranks


def patch_waits(patch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("_QUIET", 0.1), ("_AFTER_AN_ERROR", 0.3)):
        patch.setattr(f"megalith.checkpoint.background.{name}", seconds)


def wait_in_vain(folder: Path, because: Exception | None) -> list[str]:
    """What a rank logs when all close, ``because`` of an error, while no file is written."""
    with pytest.MonkeyPatch.context() as patch, held_writing() as go:
        patch_waits(patch)
        told: list[str] = []
        patch.setattr("megalith.checkpoint.background.log.info", lambda text, *values: told.append(text % values))
        patch.setattr("megalith.checkpoint.background.log.warning", lambda text, *values: told.append(text % values))
        saver = BackgroundSaver(Saved())
        saver.save(folder, 1, tensors_of(1.0), {}, keep_last=1)
        saver.close(because)
        dist.barrier()
        go.set()
        assert saver._thread is not None
        saver._thread.join()
        return told


def test_an_error_is_told_before_a_wait_that_has_an_end(tmp_path):
    given_up = "the checkpoint of step 1 was not complete after half an hour, and is given up"
    waits = "waiting for the checkpoint of step 1, which is being written"
    why = f"this program has failed (KeyError: 'root') and {waits}"
    assert ranks(2, wait_in_vain, tmp_path / "a", KeyError("root")) == [[why, given_up]] * 2
    assert ranks(2, wait_in_vain, tmp_path / "b", None) == [[waits, given_up], [given_up]]


def test_a_script_that_ends_without_waiting_ends_with_its_checkpoint(tmp_path):
    # 36 MiB: large enough to be hashed and sent to the disk by threads that start when it is written
    script = f"""
import atexit, threading, time, torch, megalith.checkpoint.save as module
from megalith.checkpoint import BackgroundSaver
write = module._write
def slowly(*args):
    time.sleep(1.0)
    return write(*args)
module._write = slowly
def refuse(self):
    raise RuntimeError("can't create new thread at interpreter shutdown")
saver = BackgroundSaver(lambda *_: None)
saver.save({str(tmp_path)!r}, 1, {{"w": torch.ones(9 << 20), "b": torch.ones(3)}}, {{}}, keep_last=1)
atexit.register(setattr, threading.Thread, "start", refuse)  # runs before the saver's; Python 3.12 does the same
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]
    verify_checkpoint(tmp_path / "step-00000001")


@pytest.mark.parametrize("known", ["raised by wait", "raised as an error of all ranks", ""])
def test_closing_logs_an_error_unless_it_is_known(known, tmp_path, monkeypatch, caplog):
    def fail(*_: Any) -> None:
        raise StorageError("the disk is full")

    monkeypatch.setattr(LocalStore, "commit", fail)
    told = "step 1 was not saved and earlier checkpoints are unchanged: the disk is full"
    saver = BackgroundSaver(Saved())
    saver.save(tmp_path, 1, tensors_of(1.0), {}, keep_last=1)
    if known == "raised by wait":
        with pytest.raises(StorageError, match="the disk is full"):
            saver.wait()
    saver.close({"raised as an error of all ranks": StorageError(told), "": KeyError("x")}.get(known))
    assert caplog.messages == ([] if known else [told])


def sharded(value: float) -> dict[str, Tensor]:
    """On two ranks, of which each writes one half."""
    full = torch.full((6, 2), value)
    return {"w": distribute_tensor(full, init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)}


def destroy_the_default_group(folder: Path, give_up: bool) -> list[int]:
    """Destroys it while nothing of step 2 is written: before ``close``, or after it gave up; the steps told of."""
    saved = Saved()
    saver = BackgroundSaver(saved)
    saver.save(folder, 1, sharded(1.0), {}, keep_last=1)
    saver.wait()
    with pytest.MonkeyPatch.context() as patch, held_writing() as go:
        patch_waits(patch)
        if give_up and dist.get_rank() == 1:
            go.set()  # and so it already waits for rank 0
        saver.save(folder, 2, sharded(2.0), {}, keep_last=1)
        if give_up:
            saver.close(KeyError("root"))
        dist.barrier()
        dist.destroy_process_group()
        thread = saver._thread
        go.set()
        assert thread is not None
        thread.join(60)
        saver.close()
    return saved


@pytest.mark.parametrize("give_up", [False, True])
def test_a_save_survives_the_end_of_the_default_group(give_up, tmp_path):
    try:
        assert ranks(2, destroy_the_default_group, tmp_path, give_up) == [[1, 2], []]
    finally:
        renew_ranks()  # these two have no default group
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000002"]
    path = find_checkpoint(tmp_path)
    assert path is not None
    verify_checkpoint(path)
    load_tensors(path, into := {"w": torch.zeros(6, 2)})
    assert into["w"].equal(torch.full((6, 2), 2.0))


def refusals(folder: Path) -> list[str]:
    """The errors of saving without the default group, and of saving when closed; nothing is written."""
    saver = BackgroundSaver(Saved())
    dist.destroy_process_group()
    told = []
    for _ in range(2):
        try:
            saver.save(folder, 1, tensors_of(1.0), {}, keep_last=1)
        except RuntimeError as error:
            told.append(str(error))
        saver.close()
    return told


CLOSED = "step 1 cannot be saved: this BackgroundSaver is closed; make another one"


def test_nothing_is_saved_without_the_default_group_of_the_start(tmp_path):
    lost = (
        "step 1 cannot be saved: this BackgroundSaver was made for 2 ranks, and the default group now has 1; save "
        "before it is destroyed, or make another one"
    )
    try:
        assert ranks(2, refusals, tmp_path) == [[lost, CLOSED]] * 2
    finally:
        renew_ranks()
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_saved_after_close(tmp_path):
    saver = BackgroundSaver(Saved())
    saver.close()
    with pytest.raises(RuntimeError, match=CLOSED):
        saver.save(tmp_path, 1, tensors_of(1.0), {}, keep_last=1)
    assert list(tmp_path.iterdir()) == []
