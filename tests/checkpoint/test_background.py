"""Saving beside training: the bytes of an ordinary save, from tensors that have changed since, one save at a time."""

import logging
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import megalith.checkpoint.save
from megalith.checkpoint import BackgroundSaver, load_tensors, save_checkpoint
from megalith.errors import CheckpointError, ConfigError, RankFailedError, StorageError
from megalith.storage import Store
from tests.checkpoint.test_save import content_of
from tests.rank_pool import ranks, renew_ranks

WRITE = megalith.checkpoint.save._write


class Saved(list[int]):
    """The steps that were saved, as ``on_saved`` is told."""

    def __call__(self, step: int, path: Store, seconds: float) -> None:
        assert str(path).endswith(f"step-{step:08}")
        assert seconds > 0.0
        self.append(step)


@contextmanager
def held_writing() -> Iterator[threading.Event]:
    """Until the yielded event is set, no file is written."""
    go = threading.Event()

    def write(*args: Any) -> Any:
        assert go.wait(60)
        return WRITE(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megalith.checkpoint.save, "_write", write)
        yield go


def tensors_of(value: float) -> dict[str, Tensor]:
    """Contiguous and strided, of several dtypes, and empty."""
    return {
        "w": torch.full((5, 3), value, dtype=torch.bfloat16),
        "columns": torch.full((4, 6), value).t()[1:, ::2],
        "step": torch.tensor(int(value)),
        "nothing": torch.empty(0, 3),
    }


@contextmanager
def collectives_of_the_thread() -> Iterator[list[object]]:
    """The groups that collectives of objects use outside of the main thread."""
    found: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather_object", "gather_object"):
            function = getattr(dist, name)

            def noting(*args: Any, function: Any = function, **kwargs: Any) -> Any:
                if threading.current_thread() is not threading.main_thread():
                    groups = [each for each in (*args, *kwargs.values()) if isinstance(each, dist.ProcessGroup)]
                    found.append(groups[0] if groups else None)
                return function(*args, **kwargs)

            patch.setattr(dist, name, noting)
        yield found


def groups_of_a_save(folder: Path) -> list[bool]:
    """Whether each collective of the thread is over the saver's own group."""
    saver = BackgroundSaver(Saved())
    group = saver._group
    with collectives_of_the_thread() as found:
        saver.save(folder, 1, tensors_of(1.0), {}, keep_last=1)
        saver.wait()
    saver.close()
    assert group not in dist.distributed_c10d._world.pg_map, "it is destroyed"
    return [each is group for each in found]


def test_the_thread_uses_no_group_of_the_training_loop(tmp_path):
    assert ranks(2, groups_of_a_save, tmp_path) == [[True] * 3] * 2


def open_without_a_network() -> str:
    """The error on this rank if rank 1 cannot connect over gloo."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megalith.checkpoint.background._TO_CONNECT", timedelta(seconds=2))
        if dist.get_rank() == 1:
            patch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
        try:
            BackgroundSaver(Saved())
        except ConfigError as error:
            return str(error)
    return ""


def test_ranks_that_cannot_connect_over_gloo_say_so_at_the_start():
    for told in ranks(2, open_without_a_network):
        assert told.startswith("saving in the background needs connections over gloo between all ranks: ")
        assert "set GLOO_SOCKET_IFNAME to the network interface" in told
        assert "checkpoint.async_save=false" in told
    renew_ranks()  # these two have counted their groups differently


def save_slowly(folder: Path) -> int:
    """Saves one step while rank 1 writes for longer than ranks may take to connect; the number of steps told of."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megalith.checkpoint.background._TO_CONNECT", timedelta(seconds=2))
        saved = Saved()
        saver = BackgroundSaver(saved)
        with held_writing() as go:
            threading.Timer(3.5 * dist.get_rank(), go.set).start()
            saver.save(folder, 1, tensors_of(1.0), {}, keep_last=1)
            saver.wait()
        saver.close()
        return len(saved)


def test_a_rank_waits_for_a_slow_writer_longer_than_for_connections(tmp_path):
    assert ranks(2, save_slowly, tmp_path) == [1, 0]


def test_what_follows_a_save_may_fail_without_failing_the_save(tmp_path, caplog):
    def fail(*_: Any) -> None:
        raise BrokenPipeError

    saver = BackgroundSaver(fail)
    saver.save(tmp_path, 1, tensors_of(1.0), {}, keep_last=1)
    saver.wait()
    assert "the checkpoint of step 1 is saved, but what should follow has failed" in caplog.messages
    assert (tmp_path / "step-00000001").is_dir()


def save_both_ways(folder: Path) -> tuple[list[int], bool]:
    """Saves two steps in both ways, each time changing the tensors before anything is written; the steps told of."""
    saved = Saved()
    saver = BackgroundSaver(saved)
    for step in (1, 2):
        tensors = tensors_of(step)
        if dist.is_initialized():
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            tensors["sharded"] = distribute_tensor(torch.arange(7.0) + step, mesh, [Shard(0)], src_data_rank=None)
        save_checkpoint(folder / "plain", step, tensors, {"step": step}, keep_last=1, best=1)
        with held_writing() as go:
            saver.save(folder / "beside", step, tensors, {"step": step}, keep_last=1, best=1)
            for tensor in tensors.values():
                (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
            told_early = bool(saved) and saved[-1] == step
            go.set()
            saver.wait()
    return saved, told_early


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_files_are_those_of_an_ordinary_save_whatever_has_become_of_the_tensors(num_ranks, tmp_path):
    assert ranks(num_ranks, save_both_ways, tmp_path) == [([1, 2], False), *[([], False)] * (num_ranks - 1)]
    plain, beside = content_of(tmp_path / "plain"), content_of(tmp_path / "beside")
    assert plain == beside
    assert {"best", "latest"} < plain.keys()
    assert {name.split("/")[0] for name in plain if "/" in name} == {"step-00000001", "step-00000002"}


def test_the_next_save_waits_for_the_one_being_written(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("megalith.checkpoint.background._QUIET", 0.05)
    saved = Saved()
    saver = BackgroundSaver(saved)
    with held_writing() as go:
        saver.save(tmp_path, 1, tensors_of(1.0), {}, keep_last=2)
        assert saved == []
        threading.Timer(0.5, go.set).start()
        saver.save(tmp_path, 2, tensors_of(2.0), {}, keep_last=2)
        assert saved[:1] == [1]
        saver.wait()
    assert saved == [1, 2]
    assert "waiting for the checkpoint of step 1, which is being written" in caplog.messages


def test_copies_are_kept_for_tensors_of_the_same_shape_and_dtype(tmp_path):
    saver = BackgroundSaver(Saved())
    saver.save(tmp_path, 1, tensors_of(1.0), {}, keep_last=9)
    saver.wait()
    before = {key: copy.data_ptr() for key, copy in saver._copies.items()}
    changed = {**tensors_of(2.0), "w": torch.full((2, 3), 2.0)}
    saver.save(tmp_path, 2, changed, {}, keep_last=9)
    saver.wait()
    assert {key for key, copy in saver._copies.items() if copy.data_ptr() == before[key]} >= {"columns", "step"}
    into = {**tensors_of(0.0), "w": torch.zeros(2, 3)}
    load_tensors(tmp_path / "step-00000002", into)
    assert all(into[key].equal(tensor) for key, tensor in changed.items())
    del changed["columns"]
    saver.save(tmp_path, 3, changed, {}, keep_last=9)
    assert saver._copies.keys() == {"w", "step"}  # nothing of an empty tensor is stored
    saver.wait()


def fail_on_rank_1(folder: Path, unexpected: bool) -> list[str]:
    """Errors of this rank: when it waits, waits again, and saves the next step. Rank 1's files may not be large."""
    saver, found = BackgroundSaver(Saved()), []
    tensor = distribute_tensor(torch.zeros(100_000), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)
    saver.save(folder, 1, {"w": tensor}, {}, keep_last=2)
    saver.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def break_down(*_: Any) -> None:
        raise ZeroDivisionError("in the thread")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            if unexpected:
                patch.setattr(megalith.checkpoint.save, "_write", break_down)
            else:
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            saver.save(folder, 2, {"w": tensor}, {}, keep_last=2)
            for again in (saver.wait, saver.wait, lambda: saver.save(folder, 3, {"w": tensor}, {}, keep_last=2)):
                try:
                    again()
                except (StorageError, RankFailedError, ZeroDivisionError) as error:
                    found.append(f"{type(error).__name__}: {error}")
            assert saver.failed
            saver.close()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return found


def test_a_failure_on_one_rank_is_raised_on_all_and_the_earlier_checkpoint_stays(tmp_path):
    first, second = ranks(2, fail_on_rank_1, tmp_path, unexpected=False)
    assert first == second
    assert len(set(first)) == 1
    assert len(first) == 3
    assert first[0].startswith(
        "StorageError: step 2 was not saved and earlier checkpoints are unchanged: rank 1: cannot write"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]


def test_an_unexpected_error_keeps_its_type_on_its_rank_and_ends_the_others(tmp_path):
    first, second = ranks(2, fail_on_rank_1, tmp_path, unexpected=True)
    assert second == ["ZeroDivisionError: in the thread"] * 3
    assert len(set(first)) == 1
    assert first[0].startswith("RankFailedError: rank 1 failed with ZeroDivisionError: in the thread")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]


def test_what_cannot_be_saved_is_refused_before_anything_is_copied(tmp_path):
    saver = BackgroundSaver(Saved())
    with pytest.raises(CheckpointError, match="the state must be JSON-serializable"):
        saver.save(tmp_path, 1, tensors_of(1.0), {"not": {1, 2}}, keep_last=1)
    assert saver._copies == {}
    saver.save(tmp_path, 1, tensors_of(1.0), {}, keep_last=1)  # and may be put right
    saver.wait()
