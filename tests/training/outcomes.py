"""A run's results, read from its folder as full tensors, whatever layout wrote it; and runs on ranks of the pool."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from megalith.checkpoint.folders import find_checkpoint
from megalith.checkpoint.load import load_tensors
from megalith.config import load_run
from megalith.observe.metrics import read_metrics
from megalith.training.loop import Outcome
from megalith.training.pretrain import pretrain

NOTHING = str  # accepts a line and drops it


def run_here(tree: dict[str, Any], world_size: int) -> Outcome:
    """Trains on this rank, in the test's own process group."""
    return pretrain(load_run(tree, world_size=world_size), NOTHING, NOTHING)


def final_tensors(folder: str | Path) -> dict[str, torch.Tensor]:
    """Weights and moments of the newest checkpoint, unsharded, whatever layout wrote it."""
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
    """The loss of each step."""
    return [record["loss"] for record in read_metrics(Path(folder)) if "loss" in record]


def saved_step(folder: str | Path) -> int:
    """The step of the newest checkpoint, or 0."""
    path = find_checkpoint(Path(folder) / "checkpoints")
    return 0 if path is None else int(path.name.removeprefix("step-"))
