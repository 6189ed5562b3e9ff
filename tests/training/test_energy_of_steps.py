"""train.log_energy: counters that the task itself advances, in records, the last line and warnings of whole runs."""

import logging
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megalith.config import load_run
from megalith.errors import ConfigError, StorageError
from megalith.insight.run_history import read_run
from megalith.observe import energy_monitor, energy_sources
from megalith.observe.energy_monitor import EnergyMonitor
from megalith.observe.metrics import read_metrics
from megalith.training import callbacks, machine_fit, pretrain
from megalith.training.energy_of_steps import EnergyOfSteps
from megalith.training.loop import Callback
from megalith.training.setup import RunParts
from megalith.training.tasks.pretrain_gpt import PretrainGPT
from tests.program import here, write_settings
from tests.rank_pool import ranks
from tests.tiny_run import SEQ, settings
from tests.training.outcomes import saved_step

FORWARD, APART = 10.0, 1e6  # joules of a forward in a step, and of an evaluation or a checkpoint


class Counter:
    """The counter of this rank's device, which cannot be read at the readings ``fails``, counted from 0."""

    def __init__(self, fails: range) -> None:
        self.name = f"device {dist.get_rank()}"
        self.used = 0.0
        self.is_closed = False
        self._fails, self._readings = fails, count()

    def joules(self) -> float | None:
        return None if next(self._readings) in self._fails else self.used

    def close(self) -> None:
        self.is_closed = True


class Heating(PretrainGPT):
    """A task whose forward uses much more energy in an evaluation."""

    def __init__(self, config: Any, counter: Counter) -> None:
        super().__init__(config)
        self.counter = counter

    def forward(self, model: Any, inputs: Any, hidden: Any) -> Any:
        self.counter.used += FORWARD if torch.is_grad_enabled() else APART
        return super().forward(model, inputs, hidden)


def lines_of(tree: dict[str, Any], world_size: int, fails: range = range(0), stops_at: int = 0) -> list[str]:
    """What a run shows and warns of, if the counter of the last rank cannot be read at ``fails``; stopped at a step."""
    config, lines = load_run(tree, world_size=world_size), []
    counter = Counter(fails if dist.get_rank() == world_size - 1 else range(0))

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Handler(logging.WARNING)
    logging.getLogger("megalith").addHandler(handler)

    class Stop(Callback):
        def on_step(self, run: Any, finished: Any) -> None:
            if run.state.step == stops_at:
                stop.reason = "the test"

    real_save = callbacks.save

    def save(*args: Any) -> Any:
        counter.used += APART
        return real_save(*args)

    stop = SimpleNamespace(reason=None, limit_time=lambda minutes: None)
    try:
        with patch.object(pretrain, "energy_source", lambda device: counter), patch.object(callbacks, "save", save):
            parts = RunParts(Heating(config, counter), callbacks=(Stop(),))
            pretrain.pretrain(config, lines.append, str, parts, stop=stop)
    finally:
        logging.getLogger("megalith").removeHandler(handler)
    assert counter.is_closed
    return lines


def tree_in(folder: Path) -> dict[str, Any]:
    """Laps end after steps 1, 3, 4 (a checkpoint) and 5."""
    train = {"steps": 5, "log_every": 3, "log_energy": True, "evaluation": {"every": 2, "samples": 2}}
    tree = settings(folder, train=train, checkpoint={"every": 4})
    tree["data"]["valid"] = tree["data"]["train"]
    return tree


def energies_of(tree: dict[str, Any]) -> dict[int, dict[str, float]]:
    """The energy in each record, by step."""
    return {record["step"]: record["energy"] for record in read_metrics(Path(tree["run"])) if "energy" in record}


def line_of(lines: list[str]) -> str:
    [line] = [line for line in lines if line.startswith("energy of the steps")]
    return line


PER_STEP = 2 * 2 * FORWARD  # two ranks with two micro-batches each
TOKENS = 8 * SEQ


def test_records_and_the_line_at_the_end_have_the_energy_of_the_steps_alone(tmp_path):
    tree = tree_in(tmp_path)
    line = line_of(ranks(2, lines_of, tree, 2)[0])
    energies = energies_of(tree)
    assert {step: each["joules"] / PER_STEP for step, each in energies.items()} == {1: 1, 3: 2, 4: 1, 5: 1}
    assert {step: each["tokens"] / TOKENS for step, each in energies.items()} == {1: 1, 3: 2, 4: 1, 5: 1}
    assert all(each["tokens_per_joule"] == TOKENS / PER_STEP for each in energies.values())
    assert all(each["counters"] == 2 and each["watts"] > 0 for each in energies.values())
    assert line.startswith("energy of the steps   200 J, 3.2 tokens/J, ")
    assert line.endswith(" W")


def test_a_stopped_run_keeps_its_last_steps_and_the_report_adds_up_its_starts(tmp_path):
    tree = tree_in(tmp_path)
    lines = ranks(2, lines_of, tree, 2, stops_at=2)[0]
    assert line_of(lines).startswith("energy of the steps   80 J, 3.2 tokens/J")
    last = [*read_metrics(Path(tree["run"]))][-1]
    assert last.keys() == {"step", "energy"}
    assert (last["step"], last["energy"]["tokens"]) == (2, TOKENS)
    lines = ranks(2, lines_of, tree, 2)[0]
    assert line_of(lines).startswith("energy of the steps   120 J, 3.2 tokens/J")
    assert read_run(Path(tree["run"])).joules == 5 * PER_STEP


def test_laps_in_which_a_counter_failed_have_no_rates_and_are_not_in_the_line(tmp_path):
    tree = tree_in(tmp_path)
    at_step_3 = range(4, 5)  # after the readings at the start, after step 1, and before and after an evaluation
    lines = ranks(2, lines_of, tree, 2, at_step_3)
    assert [line for line in lines[0] if "energy counters" in line] == [
        "1 of 2 energy counters can be read",
        "2 of 2 energy counters can be read",
    ]
    assert not [line for line in lines[1] if "energy counters" in line]
    energies = energies_of(tree)
    assert {step: each.get("missing_counters", 0) for step, each in energies.items()} == {1: 0, 3: 1, 4: 1, 5: 0}
    assert not any("watts" in energies[step] or "tokens_per_joule" in energies[step] for step in (3, 4))
    assert energies[4]["joules"] == PER_STEP / 2  # of the other rank
    line = line_of(lines[0])
    assert line.startswith("energy of the steps   80 J, 3.2 tokens/J, ")
    assert line.endswith(" W, without the steps of 2 records, in which a counter could not be read")


def test_steps_in_which_no_counter_advances_are_in_the_next_record():
    readings, now = iter([0.0, 0.0, 0.0, 30.0]), count()
    source = SimpleNamespace(name="fake", joules=lambda: next(readings))
    with patch.object(energy_monitor.time, "perf_counter", lambda: float(next(now))):
        energy = EnergyOfSteps(EnergyMonitor(source, torch.device("cpu")), tokens=50)
        energy.start()
        laps = [energy.lap(tokens) for tokens in (150, 250, 350)]
    assert laps[:2] == [None, None]
    assert laps[2] == {"tokens": 300, "joules": 30.0, "counters": 1, "watts": 10.0, "tokens_per_joule": 10.0}
    assert energy.summary() == "energy of the steps   30 J, 10 tokens/J, 10 W"


def test_a_last_record_that_cannot_be_written_ends_every_rank_and_the_checkpoint_is_there(tmp_path):
    tree = tree_in(tmp_path)
    message = "no space left"
    found = ranks(2, error_of, tree, message)
    assert all(message in error for error in found)
    assert saved_step(tree["run"]) == 2


def error_of(tree: dict[str, Any], message: str) -> str:
    real = callbacks.Metrics.write

    def write(metrics: callbacks.Metrics, record: dict[str, Any]) -> None:
        if record.keys() == {"step", "energy"} and dist.get_rank() == 0:
            raise StorageError(message)
        real(metrics, record)

    with patch.object(callbacks.Metrics, "write", write), pytest.raises(StorageError) as raised:
        lines_of(tree, 2, stops_at=2)
    return str(raised.value)


def test_without_any_reading_the_line_says_so(tmp_path):
    [lines] = ranks(1, lines_of, tree_in(tmp_path), 1, range(100))
    assert line_of(lines).endswith("not measured, without the steps of 4 records, in which a counter could not be read")


def test_a_machine_without_counters_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(energy_sources, "_POWERCAP", tmp_path / "powercap")
    monkeypatch.setattr(machine_fit, "choose_device", lambda: torch.device("cpu"))
    path = write_settings(settings(tmp_path), tmp_path)
    found = here("train", path, "train.log_energy=true")
    assert found.code == 2
    assert "train.log_energy cannot measure here: no energy counter of this machine's CPU is visible" in found.err
    assert "; set train.log_energy=false to train without it" in found.err
    assert not (tmp_path / "run").exists()
    assert here("train", path, "train.log_energy=true", "--dry-run").code == 0


def refused(tree: dict[str, Any]) -> str:
    def lost(device: torch.device) -> Any:
        raise ConfigError("NVML cannot read it")

    with patch.object(pretrain, "energy_source", lost), pytest.raises(ConfigError) as raised:
        pretrain.pretrain(load_run(tree, world_size=2), str, str)
    return str(raised.value)


def test_a_counter_that_cannot_be_opened_ends_every_rank_before_the_run_has_a_log(tmp_path):
    tree = tree_in(tmp_path)
    [message] = set(ranks(2, refused, tree))
    assert message.startswith("train.log_energy cannot measure here: NVML cannot read it; set train.log_energy=false")
    assert not (tmp_path / "run" / "logs").exists()
