"""An interrupted run equals an uninterrupted one: killed, asked to stop, or moved to another layout."""

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megalith.checkpoint.folders import find_checkpoint
from megalith.errors import StorageError
from megalith.numerics.tolerance import LAYOUT_FLOAT64
from megalith.observe.metrics import read_metrics
from megalith.resilience import stop_request
from megalith.storage import RunLock
from megalith.training.loop import Outcome
from tests.program import Ended, Program, here, start, wait_for_steps, write_settings
from tests.rank_pool import ranks
from tests.tiny_run import GPT2, settings
from tests.training.outcomes import final_tensors, losses, run_here, saved_step

DROPOUT = {**GPT2, "ffn_hidden_size": None, "num_query_groups": None}


def kill_after_step(folder: str | Path, step: int, program: Program) -> None:
    """Kills a program with SIGKILL once its metrics reach ``step``; waits until its ranks have released the run.

    The ranks end because the program has. A rank that ends gives up its memory, and with it its name, well before
    it closes its files and releases the lock on them.
    """
    wait_for_steps(program, folder, step)
    program.send_signal(signal.SIGKILL)
    assert program.ended().code == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while True:
        try:
            return RunLock(Path(folder)).release()
        except StorageError:
            assert time.monotonic() < deadline, "its ranks live on"
            time.sleep(0.02)


@dataclass(frozen=True)
class Interrupted:
    """A run that was killed, resumed by the same command and stopped by SIGTERM, and an uninterrupted one as long.

    ``killed_at`` is the last step that the killed program recorded, ``stopped`` the outcome of the resumed one.
    """

    broken: str
    whole: str
    killed_at: int
    stopped: Ended


# tests/resilience/test_deaths.py sends signals to ranks, which start slowly
@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)])
def interrupted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    """On 1 or 2 ranks. Programs take seconds to start, so one kill and one signal serve all of their tests."""
    nproc, folder = request.param, tmp_path_factory.mktemp("interrupted")
    tree = settings(folder, model=DROPOUT, parallel={"tensor": nproc})
    broken = {**tree, "train": {**tree["train"], "steps": 100000}, "checkpoint": {"every": 10}}
    command = ("train", write_settings(broken, folder), "--nproc", nproc)
    kill_after_step(broken["run"], 12, start(*command))
    killed_at = num_records(broken["run"])
    process = start(*command)
    wait_for_steps(process, broken["run"], killed_at + 2)  # what was recorded after step 10 is dropped first
    process.send_signal(signal.SIGTERM)
    stopped = process.ended()
    steps = num_records(broken["run"])
    whole = {**tree, "train": {**tree["train"], "steps": steps}, "run": str(folder / "whole")}
    assert set(ranks(nproc, run_here, whole, nproc)) == {Outcome.DONE}
    return Interrupted(broken["run"], whole["run"], killed_at, stopped)


def num_records(folder: str | Path) -> int:
    return (Path(folder) / "metrics.jsonl").read_text().count("\n")


def test_killed_after_ten_steps_and_resumed_it_ends_bitwise_as_if_it_were_not(interrupted):
    assert "resumed from" in interrupted.stopped.out
    assert f"at step {interrupted.killed_at // 10 * 10}" in interrupted.stopped.out
    want, got = final_tensors(interrupted.whole), final_tensors(interrupted.broken)
    assert want.keys() == got.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
    assert len(losses(interrupted.broken)) > interrupted.killed_at
    assert losses(interrupted.broken) == losses(interrupted.whole)


def test_sigterm_to_the_program_reaches_every_rank_and_is_waited_for(interrupted):
    assert interrupted.stopped.code == 75, interrupted.stopped
    assert "run the same command to continue from there" in interrupted.stopped.out
    assert_saved_at_the_last_step(interrupted.broken)


def assert_saved_at_the_last_step(folder: str | Path) -> None:
    saved = find_checkpoint(Path(folder) / "checkpoints")
    assert saved is not None
    assert saved.name == f"step-{read_metrics(Path(folder))[-1]['step']:08}"


def check_moved(folder: Path, model: dict[str, Any], layouts: list[tuple[int, dict[str, Any]]]) -> Path:
    """Compares two steps in each of ``layouts`` (ranks, parallel) with one process; returns the run's folder."""
    whole = settings(folder, model=model, train={"steps": 2 * len(layouts)}, run=str(folder / "whole"))
    moved = {**whole, "run": str(folder / "moved")}
    ranks(1, run_here, whole, 1)
    for number, (world_size, parallel) in enumerate(layouts, 1):
        stage = {**moved, "parallel": parallel, "train": {**moved["train"], "steps": 2 * number}}
        assert set(ranks(world_size, run_here, stage, world_size)) == {Outcome.DONE}
    want, got = final_tensors(whole["run"]), final_tensors(moved["run"])
    for name, tensor in want.items():
        size = tensor.norm() + 1e-6 * sum(other.norm() for other in want.values())
        assert (got[name] - tensor).norm() / size < LAYOUT_FLOAT64, name
    assert losses(moved["run"]) == pytest.approx(losses(whole["run"]), rel=LAYOUT_FLOAT64)
    return Path(moved["run"])


# ranks and settings of a layout, by its name in the metrics
MOVED: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2 sp dp1": (2, {"tensor": 2, "sequence": True}),
    "tp1 pp2 dp1": (2, {"pipeline": 2}),
    "tp2 cp2 dp1": (4, {"tensor": 2, "context": 2}),
    "tp1 dp4": (4, {"replicate": 2, "shard": 2}),
    "tp1 dp1": (1, {}),
}


# test_checkpoint_layouts.py has layouts of four ranks
@pytest.mark.parametrize("names", [[*MOVED][:2], pytest.param([*MOVED], marks=pytest.mark.slow)], ids=len)
def test_resumed_in_other_layouts_it_learns_the_same(names, tmp_path):
    run = check_moved(tmp_path, DROPOUT, [MOVED[name] for name in names])
    layouts = [record["layout"] for record in read_metrics(run) if "layout" in record]
    assert layouts[::2] == layouts[1::2] == names


@pytest.mark.slow
def test_stages_move_between_ranks(tmp_path):
    layouts = [
        (2, {"pipeline": 2, "virtual": 2}),
        (4, {"pipeline": 2, "tensor": 2, "sequence": True}),
        (4, {"pipeline": 2, "virtual": 2, "schedule": "zb_v", "shard": 2}),
        (4, {"pipeline": 4, "schedule": "zero_bubble"}),
        (4, {"pipeline": 2, "shard": 2}),
    ]
    check_moved(tmp_path, {**DROPOUT, "num_layers": 5, "tie_word_embeddings": True}, layouts)


SHARING = [(4, {"tensor": 4}), (2, {"tensor": 2, "sequence": True}), (4, {"tensor": 4, "sequence": True}), (1, {})]


@pytest.mark.parametrize("layouts", [SHARING[:3], pytest.param(SHARING, marks=pytest.mark.slow)], ids=len)
def test_heads_that_ranks_share_move_to_ranks_that_split_them_and_back(layouts, tmp_path):
    check_moved(tmp_path, {**DROPOUT, "num_query_groups": 2}, layouts)


def train_until_signalled(settings_file: Path, run: Path) -> int:
    """Runs ``megalith train`` on this rank; rank 1 is sent SIGUSR1 after two steps."""

    def send() -> None:
        while not (run / "metrics.jsonl").exists() or num_records(run) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)

    if os.environ["RANK"] == "1":
        threading.Thread(target=send, daemon=True).start()
    return here("train", settings_file).code


def test_a_signal_to_one_rank_stops_all_at_a_step_boundary_with_exit_code_75(tmp_path):
    tree = settings(tmp_path, parallel={"tensor": 2}, train={"steps": 100000, "log_every": 1})
    codes = ranks(2, train_until_signalled, write_settings(tree, tmp_path), Path(tree["run"]))
    assert codes == [75, 75]
    assert_saved_at_the_last_step(tree["run"])


def train_through_an_hour(settings_file: Path, run: Path) -> Ended:
    """Runs ``megalith train`` on this rank, whose clock advances by an hour after the second step."""

    class Clock:
        @staticmethod
        def monotonic() -> float:
            has_stepped = (run / "metrics.jsonl").exists() and num_records(run) >= 2
            return time.monotonic() + (3600.0 if has_stepped else 0.0)

    with patch.object(stop_request, "time", Clock):
        return here("train", settings_file)


def test_a_time_limit_stops_a_run_with_its_state_saved_and_says_that_it_was_the_reason(tmp_path):
    tree = settings(tmp_path, train={"steps": 100000, "log_every": 1, "time_limit": 59.5})
    [found] = ranks(1, train_through_an_hour, write_settings(tree, tmp_path), Path(tree["run"]))
    assert found.code == 75
    assert_saved_at_the_last_step(tree["run"])
    saved = f"saved at step {saved_step(tree['run'])}; run the same command to continue from there"
    assert f"train.time_limit (59.5 minutes) has passed: {saved}" in found.out.splitlines()


def test_a_time_limit_that_is_too_short_to_start_says_so_and_draws_no_report(tmp_path):
    tree = settings(tmp_path, train={"steps": 100000, "time_limit": 1e-6})
    [found] = ranks(1, here, "train", write_settings(tree, tmp_path))
    assert found.code == 75
    *_, last = found.out.splitlines()
    assert last.startswith("train.time_limit (1e-06 minutes) has passed before the first step, because startup")
    assert last.endswith("raise it")


def test_evaluating_on_the_way_changes_nothing(tmp_path):
    quiet = settings(tmp_path, model=DROPOUT, train={"steps": 4}, run=str(tmp_path / "quiet"))
    asking = {**quiet, "run": str(tmp_path / "asking"), "data": {**quiet["data"], "valid": quiet["data"]["train"]}}
    asking["train"] = {**quiet["train"], "evaluation": {"every": 1}}
    for tree in (quiet, asking):
        ranks(2, run_here, tree, 2)
    want, got = final_tensors(quiet["run"]), final_tensors(asking["run"])
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
    assert losses(asking["run"]) == losses(quiet["run"])
