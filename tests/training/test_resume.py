"""A run that is interrupted is the run that was not: killed, asked to stop, or moved to another layout."""

import os
import signal
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
from tests.program import ended, start, wait_for_steps, write_settings
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


@pytest.mark.parametrize("nproc", [1, 2])
def test_killed_after_ten_steps_and_resumed_it_ends_bitwise_as_if_it_were_not(nproc, tmp_path):
    parallel = {"tensor": nproc}
    train = {"steps": 20, "log_every": 20}
    whole = settings(tmp_path, model=DROPOUT, parallel=parallel, train=train, run=str(tmp_path / "whole"))
    broken = {**whole, "run": str(tmp_path / "broken"), "checkpoint": {"every": 10}}
    assert set(ranks(nproc, run_here, whole, nproc)) == {Outcome.DONE}
    command = ("train", write_settings(broken, tmp_path), "--nproc", nproc)
    kill_after_step(broken["run"], 12, start(*command))
    resumed = ended(start(*command))
    assert resumed.code == 0, resumed
    assert "resumed from" in resumed.out
    assert "at step 10" in resumed.out
    want, got = final_tensors(whole["run"]), final_tensors(broken["run"])
    assert want.keys() == got.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
    assert losses(broken["run"]) == losses(whole["run"])


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


def test_a_signal_to_one_rank_stops_all_at_a_step_boundary_with_exit_code_75(tmp_path):
    tree = settings(tmp_path, parallel={"tensor": 2}, train={"steps": 100000, "log_every": 1})
    process = start("train", write_settings(tree, tmp_path), "--nproc", 2)
    wait_for_steps(process, tree["run"], 2)
    one_rank = next(child for child in children(process) if rank_of(child) == "1")
    os.kill(int(one_rank), signal.SIGUSR1)
    found = ended(process)
    assert found.code == 75, found
    saved = find_checkpoint(Path(tree["run"]) / "checkpoints")
    steps = [record["step"] for record in read_metrics(Path(tree["run"]))]
    assert saved is not None
    assert saved.name == f"step-{steps[-1]:08}"


def rank_of(pid: str) -> str | None:
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((entry[5:].decode() for entry in entries if entry.startswith(b"RANK=")), None)


def test_sigterm_to_the_program_reaches_every_rank_and_is_waited_for(tmp_path):
    tree = settings(tmp_path, parallel={"shard": 2}, train={"steps": 100000, "log_every": 1})
    process = start("train", write_settings(tree, tmp_path), "--nproc", 2)
    wait_for_steps(process, tree["run"], 2)
    process.send_signal(signal.SIGTERM)
    found = ended(process)
    assert found.code == 75, found
    assert "the same command goes on from there" in found.out
    assert find_checkpoint(Path(tree["run"]) / "checkpoints") is not None


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
