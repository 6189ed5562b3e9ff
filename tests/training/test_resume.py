"""A run that is interrupted is the run that was not: killed, asked to stop, or moved to another layout."""

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megalith.checkpoint.folders import find_checkpoint
from megalith.checkpoint.load import load_tensors
from megalith.config import load_run
from megalith.numerics.tolerance import LAYOUT_FLOAT64
from megalith.observe.metrics import read_metrics
from megalith.training.loop import Outcome
from megalith.training.pretrain import pretrain
from tests.program import Ended, ended, here, start, wait_for_steps, write_settings
from tests.rank_pool import ranks
from tests.tiny_run import GPT2, settings

NOTHING = str  # takes a line and drops it
DROPOUT = {**GPT2, "ffn_hidden_size": None, "num_query_groups": None}


def run_here(tree: dict[str, Any], world_size: int) -> Outcome:
    """Trains on this rank of the test's own process group."""
    return pretrain(load_run(tree, world_size=world_size), NOTHING, NOTHING)


def final_tensors(folder: str | Path) -> dict[str, torch.Tensor]:
    """Weights and moments of the newest checkpoint, whole, whatever layout wrote it."""
    path = find_checkpoint(Path(folder) / "checkpoints")
    assert path is not None
    pieces: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        pieces |= load_file(file)
    if not any("@" in key for key in pieces):
        return pieces
    wholes = {key.partition("@")[0]: None for key in pieces}
    ends: dict[str, list[int]] = {}
    for key, piece in pieces.items():
        name, _, ranges = key.partition("@")
        here = [int(r.split(":")[1]) for r in ranges.split(",")] if ranges else list(piece.shape)
        ends[name] = [max(a, b) for a, b in zip(ends.get(name, here), here, strict=True)]
    into = {name: torch.empty(ends[name], dtype=torch.float64) for name in wholes}
    load_tensors(path, into)
    return into


def losses(folder: str | Path) -> list[float]:
    return [record["loss"] for record in read_metrics(Path(folder)) if "loss" in record]


def kill_after_step(folder: str | Path, step: int, process: Any) -> None:
    """kill -9 of a program and its ranks, once its metrics reach ``step``."""
    wait_for_steps(process, folder, step)
    for pid in (*children(process), process.pid):  # ranks are in sessions of their own
        os.kill(int(pid), signal.SIGKILL)
    process.communicate()


def children(process: Any) -> list[str]:
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()


@dataclass(frozen=True)
class Interrupted:
    """A run that was killed, resumed by the same command and stopped by SIGTERM, and one that went as far undisturbed.

    ``killed_at`` is the last step that the killed program recorded, ``stopped`` what became of the resumed one.
    """

    broken: str
    whole: str
    killed_at: int
    stopped: Ended


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2])
def interrupted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    """On 1 or 2 ranks. Programs take seconds to start, so one kill and one signal serve every test of them."""
    nproc, folder = request.param, tmp_path_factory.mktemp("interrupted")
    tree = settings(folder, model=DROPOUT, parallel={"tensor": nproc})
    broken = {**tree, "train": {**tree["train"], "steps": 100000}, "checkpoint": {"every": 10}}
    command = ("train", write_settings(broken, folder), "--nproc", nproc)
    kill_after_step(broken["run"], 12, start(*command))
    killed_at = num_records(broken["run"])
    process = start(*command)
    wait_for_steps(process, broken["run"], killed_at + 2)  # what was recorded after step 10 is dropped first
    process.send_signal(signal.SIGTERM)
    stopped = ended(process)
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
    assert "the same command goes on from there" in interrupted.stopped.out
    assert_saved_at_the_last_step(interrupted.broken)


def assert_saved_at_the_last_step(folder: str | Path) -> None:
    saved = find_checkpoint(Path(folder) / "checkpoints")
    assert saved is not None
    assert saved.name == f"step-{read_metrics(Path(folder))[-1]['step']:08}"


def test_resumed_in_other_layouts_it_learns_the_same(tmp_path):
    whole = settings(tmp_path, model=DROPOUT, train={"steps": 6}, run=str(tmp_path / "whole"))
    moved = {**whole, "run": str(tmp_path / "moved")}
    ranks(1, run_here, whole, 1)
    for steps, world_size, parallel in (
        (2, 2, {"tensor": 2, "sequence": True}),
        (4, 4, {"replicate": 2, "shard": 2}),
        (6, 1, {}),
    ):
        stage = {**moved, "parallel": parallel, "train": {**moved["train"], "steps": steps}}
        assert set(ranks(world_size, run_here, stage, world_size)) == {Outcome.DONE}
    want, got = final_tensors(whole["run"]), final_tensors(moved["run"])
    for name, tensor in want.items():
        size = tensor.norm() + 1e-6 * sum(other.norm() for other in want.values())
        assert (got[name] - tensor).norm() / size < LAYOUT_FLOAT64, name
    assert losses(moved["run"]) == pytest.approx(losses(whole["run"]), rel=LAYOUT_FLOAT64)
    layouts = [record["layout"] for record in read_metrics(Path(moved["run"])) if "layout" in record]
    assert layouts == ["tp2 sp dp1"] * 2 + ["tp1 dp4"] * 2 + ["tp1 dp1"] * 2


def signalled_program(tree: dict[str, Any], settings_file: Path) -> list[int]:
    """Exit code of a program of two ranks, one of which is sent SIGUSR1."""
    process = start("train", settings_file, "--nproc", 2)
    wait_for_steps(process, tree["run"], 2)
    one_rank = next(child for child in children(process) if rank_of(child) == "1")
    os.kill(int(one_rank), signal.SIGUSR1)
    return [ended(process).code]


def signalled_ranks(tree: dict[str, Any], settings_file: Path) -> list[int]:
    """The same of two ranks of the pool: what each would exit with."""
    return ranks(2, train_until_signalled, settings_file, Path(tree["run"]))


def train_until_signalled(settings_file: Path, run: Path) -> int:
    """``megalith train`` in this rank; rank 1 is sent SIGUSR1 after two steps."""

    def send() -> None:
        while not (run / "metrics.jsonl").exists() or num_records(run) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)

    if os.environ["RANK"] == "1":
        threading.Thread(target=send, daemon=True).start()
    return here("train", settings_file).code


@pytest.mark.parametrize("train", [signalled_ranks, pytest.param(signalled_program, marks=pytest.mark.slow)])
def test_a_signal_to_one_rank_stops_all_at_a_step_boundary_with_exit_code_75(train, tmp_path):
    tree = settings(tmp_path, parallel={"tensor": 2}, train={"steps": 100000, "log_every": 1})
    assert set(train(tree, write_settings(tree, tmp_path))) == {75}
    assert_saved_at_the_last_step(tree["run"])


def rank_of(pid: str) -> str | None:
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((entry[5:].decode() for entry in entries if entry.startswith(b"RANK=")), None)


def test_a_time_limit_stops_a_run_with_its_state_saved(tmp_path):
    tree = settings(tmp_path, train={"steps": 100000, "time_limit": 0.01})
    assert ranks(1, run_here, tree, 1) == [Outcome.STOPPED]
    assert find_checkpoint(Path(tree["run"]) / "checkpoints") is not None


def test_evaluating_on_the_way_changes_nothing(tmp_path):
    quiet = settings(tmp_path, model=DROPOUT, train={"steps": 4}, run=str(tmp_path / "quiet"))
    asking = {**quiet, "run": str(tmp_path / "asking"), "data": {**quiet["data"], "valid": quiet["data"]["train"]}}
    asking["train"] = {**quiet["train"], "evaluation": {"every": 1}}
    for tree in (quiet, asking):
        ranks(2, run_here, tree, 2)
    want, got = final_tensors(quiet["run"]), final_tensors(asking["run"])
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
    assert losses(asking["run"]) == losses(quiet["run"])
