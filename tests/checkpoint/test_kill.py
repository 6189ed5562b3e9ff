"""kill -9 while saving: a complete checkpoint is always found, and it is never older than the last one saved."""

import itertools
import multiprocessing
import os
import random
import signal
import sys
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megalith.checkpoint import (
    BackgroundSaver,
    find_checkpoint,
    load_tensors,
    read_state,
    save_checkpoint,
    verify_checkpoint,
)

SIZE = 100_003  # about a megabyte, so that some kills happen in the middle of writing
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["pytest", "torch.distributed.tensor", "torch.distributed.fsdp"])


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    full = {"weight": torch.full((SIZE,), step, dtype=torch.float64), "step": torch.tensor(step)}
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        full["weight"] = distribute_tensor(full["weight"], mesh, [Shard(0)], src_data_rank=None)
    return full


def save(folder: Path, step: int, keep_last: int = 2) -> None:
    save_checkpoint(folder, step, tensors_of(step), {"step": step}, keep_last=keep_last)


def save_forever(rank: int, num_ranks: int, folder: Path, store: str, saved: Connection, beside: bool) -> None:
    """Rank ``rank`` of a run that saves every step, and reports each save; ``beside``: with a BackgroundSaver."""
    torch.set_num_threads(1)
    if num_ranks > 1:
        dist.init_process_group("gloo", store=dist.FileStore(store, num_ranks), rank=rank, world_size=num_ranks)
    saver = BackgroundSaver(lambda step, path, seconds: saved.send(step))
    for step in itertools.count(1):
        if beside:
            saver.save(folder, step, tensors_of(step), {"step": step}, keep_last=2)
        else:
            save(folder, step)
            saved.send(step)


def newest_is_sound(folder: Path) -> int:
    """The step of the newest checkpoint, after reading all of it."""
    path = find_checkpoint(folder)
    assert path is not None
    verify_checkpoint(path)
    step = read_state(path)["step"]
    into = tensors_of(-1)
    load_tensors(path, into)
    assert into["weight"].eq(step).all()
    assert into["step"] == step
    return step


def start(num_ranks: int, tmp_path: Path, beside: bool) -> tuple[list[BaseProcess], list[Connection]]:
    processes, reports = [], []
    for rank in range(num_ranks):
        report, saved = CONTEXT.Pipe(duplex=False)
        args = (rank, num_ranks, tmp_path / "checkpoints", str(tmp_path / "store"), saved, beside)
        processes.append(CONTEXT.Process(target=save_forever, args=args, daemon=True))
        processes[-1].start()
        saved.close()
        reports.append(report)
    return processes, reports


def last_of(report: Connection) -> int:
    """The last step that a rank reported as saved; drains its reports."""
    step = 0
    try:
        while True:
            step = report.recv()
    except EOFError:
        return step


KILLS = ["a run of one rank", "both ranks", "rank 0 of two", "rank 1 of two"]
NUMBERS = [pytest.param(number, marks=pytest.mark.slow if number >= len(KILLS) else ()) for number in range(34)]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("beside", [False, True], ids=["saving", "saving in the background"])
def test_a_kill_at_a_random_moment_of_saving_loses_nothing_that_was_saved(tmp_path, number, beside):
    kill = KILLS[number % len(KILLS)]
    chance = random.Random(number)
    processes, reports = start(1 if kill == KILLS[0] else 2, tmp_path, beside)
    reports[0].poll(60)  # the first is saved
    time.sleep(chance.uniform(0, 0.2))
    victims = {KILLS[2]: [0], KILLS[3]: [1]}.get(kill, list(range(len(processes))))
    chance.shuffle(victims)
    for rank in victims:
        os.kill(processes[rank].pid, signal.SIGKILL)
    for process in processes:
        process.join(60)  # a rank whose peer died exits too: gloo sees the closed connection
        assert process.exitcode not in (None, 0)
    saved = max(map(last_of, reports))
    folder = tmp_path / "checkpoints"
    found = newest_is_sound(folder)
    assert found in (saved, saved + 1)  # it may have died between publishing and reporting it
    save(folder, found + 1)
    assert newest_is_sound(folder) == found + 1
    assert not list(folder.glob(".*"))


# names of CPython's audit events
FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir"}


def die_at(number: int, folder: Path) -> None:
    """Saves step 2 after step 1, with keep_last=1; killed before its ``number``-th use of the file system."""
    torch.set_num_threads(1)
    save(folder, 1, keep_last=1)
    uses = itertools.count(1)

    def count(event: str, _: tuple[object, ...]) -> None:
        if event in FILE_EVENTS and next(uses) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    save(folder, 2, keep_last=1)
    os._exit(0)


def die_everywhere(folder: Path) -> None:
    """Runs ``die_at`` for 1, 2, ... in separate processes, until one survives; the n-th saves in ``folder/n``."""
    for number in itertools.count(1):
        if (child := os.fork()) == 0:
            die_at(number, folder / str(number))
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) == 0:
            os._exit(0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def test_a_kill_before_any_use_of_the_file_system_leaves_the_old_or_the_new(tmp_path):
    # fork from a process without this one's threads
    process = CONTEXT.Process(target=die_everywhere, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 0
    folders = [tmp_path / str(number) for number in range(1, len(list(tmp_path.iterdir())) + 1)]
    found = [newest_is_sound(folder) for folder in folders]
    assert found == sorted(found)  # once the new one is found, it is found from then on
    assert found[0] == 1
    assert found[-2] == 2
    assert len(found) > 20
    for folder in folders:
        save(folder, 3, keep_last=1)
        assert newest_is_sound(folder) == 3
        assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-00000003"]
