"""What a checkpoint records of a run's data and settings, which ranks report it, and how changes are reported."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megalith.training.continuity import changed, compared
from megalith.training.tasks.pretrain_gpt import PretrainGPT
from tests.program import write_settings
from tests.rank_pool import ranks
from tests.tiny_run import settings, write_dataset
from tests.training.starts import MODEL, go_on_with, snapshot


def test_every_value_that_differs_is_told_by_its_dotted_name():
    before = {"optim": {"lr": 1e-3, "name": "adamw", "wsd": None}, "gone": 1, "model": {"rope": {"base": 1e4}}}
    now = {"optim": {"lr": 2e-3, "name": "adamw", "wsd": {"steps": 4}}, "model": {"rope": {"base": 1e5}, "new": [1]}}
    assert changed(before, now) == [
        "optim.lr 0.001 -> 0.002",
        'optim.wsd null -> {"steps": 4}',
        "model.rope.base 10000.0 -> 100000.0",
        "model.new (not set) -> [1]",
        "gone 1 -> (not set)",
    ]
    assert changed(now, now) == []


def test_where_one_side_is_silent_nothing_is_compared():
    assert compared({"a": 1, "b": None, "c": 2, "d": 3}, {"a": 2, "b": 1, "c": None}) == ["a"]


class SilentSamples:
    """Samples without an identity."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class OwnSamples(SilentSamples):
    def __init__(self, samples: Any, name: Any) -> None:
        super().__init__(samples)
        self.name = name

    def identity(self) -> dict[str, Any]:
        return {"corpus": self.name}


class Silent(PretrainGPT):
    def train_dataset(self) -> Any:
        return SilentSamples(super().train_dataset())


class Own(PretrainGPT):
    """Its samples are named by an environment variable, on rank 1 by an additional one."""

    def train_dataset(self) -> Any:
        name: Any = os.environ.get("CORPUS", "first")
        if dist.get_rank() == 1:
            name = os.environ.get("CORPUS_1", name)
        return OwnSamples(super().train_dataset(), name.split() if " " in name else name)


def go_on_as(file: Path, overrides: list[str], task: type[PretrainGPT], names: dict[str, str]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setenv(name, value)
        return go_on_with(file, overrides, task)


def test_a_users_samples_tell_what_they_are_or_a_line_says_that_they_do_not(file, tmp_path):
    def start(task: type[PretrainGPT], num_steps: int, num_ranks: int = 1, **names: str) -> list[str]:
        overrides = [f"run={tmp_path / task.__name__}", f"train.steps={num_steps}", f"parallel.tensor={num_ranks}"]
        return ranks(num_ranks, go_on_as, file, overrides, task, names)

    assert "started at" in start(Own, 1)[0]
    [resumed] = start(Own, 2)
    assert "resumed from" in resumed
    assert "unnoticed" not in resumed
    [refused] = start(Own, 3, CORPUS="second")
    assert 'the training data have changed: corpus "first" -> "second"' in refused
    for message in start(Own, 3, num_ranks=2, CORPUS_1="second"):
        assert 'all ranks must read the same training data; rank 0 and rank 1 differ in corpus "first"' in message
    [message] = start(Own, 3, CORPUS="a list")
    assert "must have plain values; Own gives corpus = ['a', 'list']; give a string" in message
    start(Silent, 1)
    [line] = [line for line in start(Silent, 2)[0].splitlines() if line.startswith("Silent")]
    assert line == "Silent does not identify its training data (data_identity), so changes go unnoticed"


@pytest.fixture
def file(tmp_path):
    """Settings of a run in float32."""
    return write_settings(settings(tmp_path, model=MODEL, precision={"dtype": "float32"}), tmp_path)


def go_on_with_own_files(file: Path, overrides: list[str], other: str) -> str:
    return go_on_with(file, overrides + [f"data.train={other}"] * dist.get_rank())


def test_a_rank_that_sees_other_files_ends_all_of_them_before_anything_is_written(file, tmp_path):
    other = write_dataset(tmp_path / "other", seed=1)
    overrides = [f"run={tmp_path / 'run'}", "parallel.tensor=2"]
    first, second = ranks(2, go_on_with_own_files, file, overrides, other)
    assert first == second
    assert "rank 0 and rank 1 differ in text " in first
    assert snapshot(tmp_path / "run") == {}


def go_on_with_own_settings(file: Path, overrides: list[str], of_rank_1: list[str]) -> str:
    return go_on_with(file, overrides + of_rank_1 * dist.get_rank())


def test_a_rank_with_settings_of_its_own_ends_all_of_them_before_anything_is_written(file, tmp_path):
    overrides = [f"run={tmp_path / 'run'}", "model.moe.num_experts=4", "model.moe.capacity.factor=1.0"]
    of_rank_1 = ["model.moe.capacity.factor=1.5"]
    first, second = ranks(2, go_on_with_own_settings, file, overrides, of_rank_1)
    assert first == second
    assert "same settings; rank 0 and rank 1 differ in model.moe.capacity.factor 1.0 -> 1.5; start every" in first
    assert snapshot(tmp_path / "run") == {}
