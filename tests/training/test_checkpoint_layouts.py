"""Checkpoints of generated layouts equal those of one process, and every layout resumes from any of them.

Layouts of one model, batch and data are interchangeable: what one has written after two steps, weights and moments,
equals that of one process, and another one resumes from it with the losses of an undisturbed process.
"""

import random
import shutil
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.numerics.tolerance import LAYOUT_FLOAT64, gradient_error
from megalith.observe.metrics import read_metrics
from megalith.training.loop import Outcome
from tests.rank_pool import ranks
from tests.sampling import cover
from tests.tiny_run import settings
from tests.training.layout_cover import AXES, Row, is_layout, layouts, settings_of, world_size
from tests.training.outcomes import final_tensors, run_here

# what layouts that exchange checkpoints have in common; five layers divide unevenly into any number of stages
MODELS: dict[str, Row] = {
    "llama": {"num_layers": 5, "num_query_groups": 2, "tied": False, "packed": True, "dropout": 0.0, "ragged": True},
    "gpt2": {"num_layers": 5, "num_query_groups": 1, "tied": True, "packed": False, "dropout": 0.1, "ragged": False},
}
LAYOUTS_OF_A_MODEL, PAIRS_OF_A_MODEL = 10, 20
BATCH_SIZE = 4
SAVED, LAST = 2, 7  # steps
ALONE = "one process"
SLOW = pytest.mark.slow


def parallel_of(row: Row) -> dict[str, Any]:
    """The settings of a layout that differ from those of one process."""
    return {name: value for name, value in settings_of(row)["parallel"].items() if value != AXES.get(name, [None])[0]}


def name_of(row: Row) -> str:
    return " ".join(name if value is True else f"{name}={value}" for name, value in parallel_of(row).items())


def features(row: Row) -> set[Any]:
    """Each axis with its size, the method and the schedule."""
    return {*parallel_of(row).items(), ("ranks", world_size(row)), ("replicas", row["replicate"], row["shard"])}


def interchangeable(model: str) -> dict[str, Row]:
    """Layouts of ``model`` by name; the first of them have every feature that any of them has."""
    generated = random.Random(model).sample(layouts(200), 200)
    rows = [row for each in generated if is_layout(row := {**each, "shape": model, **MODELS[model]}, BATCH_SIZE)]
    by_name = {name: row for row in rows if (name := name_of(row))}
    first = cover(list(by_name), lambda name: features(by_name[name]))
    assert len(first) <= LAYOUTS_OF_A_MODEL
    names = [*first, *(name for name in by_name if name not in first)]
    return {name: by_name[name] for name in names[:LAYOUTS_OF_A_MODEL]}


LAYOUTS = {model: interchangeable(model) for model in MODELS}


class Runs:
    """Runs of ``model``: what each layout has written after two steps, and one process that takes all steps."""

    def __init__(self, model: str, folder: Path) -> None:
        self.folder = folder
        one_process = {axis: values[0] for axis, values in AXES.items()}
        self.rows = {ALONE: {**one_process, "shape": model, **MODELS[model]}, **LAYOUTS[model]}
        self._losses: list[float] = []

    def run(self, name: str, folder: Path, last_step: int) -> None:
        """Trains in the layout ``name`` up to ``last_step``, continuing what is in ``folder``."""
        row = self.rows[name]
        tree = settings(self.folder, **settings_of(row, BATCH_SIZE), run=str(folder))
        tree["train"]["steps"] = last_step
        assert set(ranks(world_size(row), run_here, tree, world_size(row), timeout=120)) == {Outcome.DONE}

    def written_by(self, name: str) -> Path:
        """The folder of a run of two steps in the layout ``name``."""
        folder = self.folder / name
        if not folder.exists():
            self.run(name, folder, SAVED)
        return folder

    def losses(self) -> list[float]:
        """The losses of one process after step ``SAVED``, without interruption."""
        if not self._losses:
            self.run(ALONE, self.folder / "whole", LAST)
            self._losses = [record["loss"] for record in read_metrics(self.folder / "whole")[SAVED:]]
        return self._losses


@pytest.fixture(scope="module")
def runs_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Runs]:
    return {model: Runs(model, tmp_path_factory.mktemp(model)) for model in MODELS}


def check_goes_on(runs: Runs, writer: str, reader: str, folder: Path) -> None:
    # the checkpoint alone: metrics that begin after it show that it was read
    shutil.copytree(runs.written_by(writer) / "checkpoints", folder / "checkpoints")
    runs.run(reader, folder, LAST)
    records = read_metrics(folder)
    assert [record["step"] for record in records] == list(range(SAVED + 1, LAST + 1))
    assert [record["loss"] for record in records] == pytest.approx(runs.losses(), rel=LAYOUT_FLOAT64, abs=0)


def parameters(choices: dict[str, list[tuple[str, ...]]]) -> list[Any]:
    """``choices`` of layouts for each model; `make test` takes those of the tied model that end in a small pipeline."""
    return [
        pytest.param(model, *names, id=f"{model}: {' -> '.join(names)}", marks=() if is_small(model, names) else SLOW)
        for model, chosen in choices.items()
        for names in chosen
    ]


def is_small(model: str, names: tuple[str, ...]) -> bool:
    rows = [LAYOUTS[model][name] for name in names]
    return MODELS[model]["tied"] and all(world_size(row) == 4 for row in rows) and rows[-1]["pipeline"] > 1


EACH = {model: [(name,) for name in rows] for model, rows in LAYOUTS.items()}
PAIRS = {
    model: random.Random(model).sample(list(permutations(rows, 2)), PAIRS_OF_A_MODEL) for model, rows in LAYOUTS.items()
}


@pytest.mark.parametrize(("model", "name"), parameters(EACH))
def test_a_layout_writes_what_one_process_does(model, name, runs_of):
    runs = runs_of[model]
    want, got = final_tensors(runs.written_by(ALONE)), final_tensors(runs.written_by(name))
    assert got.keys() == want.keys()
    for kind in ("optimizer.exp_avg.", "optimizer.exp_avg_sq.", ""):
        of_kind = {key: want.pop(key) for key in list(want) if key.startswith(kind)}
        all_norm = torch.stack([tensor.norm() for tensor in of_kind.values()]).norm().item()
        for key, tensor in of_kind.items():
            assert gradient_error(got[key], tensor, all_norm) < LAYOUT_FLOAT64, key


@pytest.mark.parametrize(("model", "name"), parameters(EACH))
def test_a_layout_goes_on_from_the_checkpoint_of_one_process(model, name, runs_of, tmp_path):
    check_goes_on(runs_of[model], ALONE, name, tmp_path)


@pytest.mark.parametrize(("model", "writer", "reader"), parameters(PAIRS))
def test_a_layout_goes_on_from_the_checkpoint_of_another(model, writer, reader, runs_of, tmp_path):
    check_goes_on(runs_of[model], writer, reader, tmp_path)
