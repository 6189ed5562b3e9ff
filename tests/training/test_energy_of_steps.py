"""train.log_energy: counters that the task itself advances, in records, the last line and warnings of whole runs."""

import logging
import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from megalith.config import load_run
from megalith.observe import energy_sources
from megalith.observe.metrics import read_metrics
from megalith.training import preflight, pretrain
from megalith.training.setup import RunParts
from megalith.training.tasks.pretrain_gpt import PretrainGPT
from tests.program import here, write_settings
from tests.rank_pool import ranks
from tests.tiny_run import SEQ, settings

STEP, EVALUATION = 10.0, 1e6  # joules of a forward


class Counter:
    """The counter of this rank's device, which cannot be read from its ``fails_at``-th reading on."""

    def __init__(self, fails_at: float) -> None:
        self.name = f"device {dist.get_rank()}"
        self.used = 0.0
        self.is_closed = False
        self._left = fails_at

    def joules(self) -> float | None:
        self._left -= 1
        return self.used if self._left >= 0 else None

    def close(self) -> None:
        self.is_closed = True


class Heating(PretrainGPT):
    """A task whose forward uses much more energy in an evaluation."""

    def __init__(self, config: Any, counter: Counter) -> None:
        super().__init__(config)
        self.counter = counter

    def forward(self, model: Any, inputs: Any, hidden: Any) -> Any:
        self.counter.used += STEP if torch.is_grad_enabled() else EVALUATION
        return super().forward(model, inputs, hidden)


def lines_of(tree: dict[str, Any], world_size: int, fails_at: float) -> list[str]:
    """What a run shows and warns of, if the counter of the last rank fails at that reading."""
    config, lines = load_run(tree, world_size=world_size), []
    counter = Counter(fails_at if dist.get_rank() == world_size - 1 else math.inf)
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megalith").addHandler(handler)
    try:
        with patch.object(pretrain, "energy_source", lambda device: counter):
            pretrain.pretrain(config, lines.append, str, RunParts(Heating(config, counter)))
    finally:
        logging.getLogger("megalith").removeHandler(handler)
    assert counter.is_closed
    return lines


def tree_in(folder: Path, **train: Any) -> dict[str, Any]:
    tree = settings(folder, train={"steps": 5, "log_every": 2, "log_energy": True, **train}, checkpoint={"every": 3})
    tree["data"]["valid"] = tree["data"]["train"]
    return tree


def test_records_and_the_last_line_have_the_energy_of_the_steps_alone(tmp_path):
    tree = tree_in(tmp_path, evaluation={"every": 2, "samples": 2})
    lines = ranks(2, lines_of, tree, 2, math.inf)[0]
    steps = {record["step"]: record.get("energy") for record in read_metrics(Path(tree["run"])) if "loss" in record}
    per_step = 2 * 2 * STEP  # two ranks with two micro-batches each
    tokens = 8 * SEQ
    joules = {step: energy and energy["joules"] for step, energy in steps.items()}
    assert joules == {1: per_step, 2: per_step, 3: None, 4: 2 * per_step, 5: per_step}
    assert all(energy["tokens_per_joule"] == tokens / per_step for energy in steps.values() if energy)
    assert all(energy["counters"] == 2 and energy["watts"] > 0 for energy in steps.values() if energy)
    [line] = [line for line in lines if line.startswith("energy of the steps")]
    assert line.startswith("energy of the steps   200 J, 3.2 tokens/J, ")
    assert line.endswith(" W")


def test_a_counter_that_fails_is_warned_of_and_the_line_says_what_is_missing(tmp_path):
    tree = tree_in(tmp_path)
    lines = ranks(2, lines_of, tree, 2, 4)[0]  # read at the start, twice at step 1, and before step 2 ends
    assert "only 1 of 2 energy counters could be read" in lines
    [line] = [line for line in lines if line.startswith("energy of the steps")]
    assert line.endswith("W, read from only 1 of 2 counters at times")
    energies = [record["energy"]["counters"] for record in read_metrics(Path(tree["run"])) if "energy" in record]
    assert energies[0] == 2
    assert energies[-1] == 1


def test_without_a_reading_the_line_says_so(tmp_path):
    tree = tree_in(tmp_path)
    [lines] = ranks(1, lines_of, tree, 1, 0)
    assert "energy of the steps   not measured, read from only 0 of 1 counters at times" in lines
    assert not [record for record in read_metrics(Path(tree["run"])) if "energy" in record]


def test_a_machine_without_counters_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(energy_sources, "_POWERCAP", tmp_path / "powercap")
    monkeypatch.setattr(preflight, "choose_device", lambda: torch.device("cpu"))
    path = write_settings(settings(tmp_path), tmp_path)
    found = here("train", path, "train.log_energy=true")
    assert found.code == 2
    assert "train.log_energy: this machine has no energy counter of its CPU" in found.err
    assert "set train.log_energy=false" in found.err
    assert not (tmp_path / "run").exists()
