"""Every option of the model learns in five layouts what it learns in one process: float64, gloo ranks, two steps.

The options are in the tables ``model_options_*.py`` next to this file: name -> groups of settings.
"""

import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.rank_pool import ranks
from tests.sampling import cover
from tests.tiny_run import settings
from tests.training.on_ranks import first_steps
from tests.training.reference import Trajectory, differences, reference

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor 2, sequence": (2, {"tensor": 2, "sequence": True}),
    "pipeline 2": (2, {"pipeline": 2}),
    "context 2": (2, {"context": 2}),
    "shard 2": (2, {"shard": 2}),
    "tensor 2 x shard 2": (4, {"tensor": 2, "shard": 2}),
}


def options() -> tuple[dict[str, dict[str, Any]], dict[str, tuple[str, bool]]]:
    """All tables merged into one, and for each option its table and which half of the table it is in.

    Two tables with the same name would hide an option, so this is an error.
    """
    found: dict[str, dict[str, Any]] = {}
    places: dict[str, tuple[str, bool]] = {}
    for file in sorted(Path(__file__).parent.glob("model_options_*.py")):
        table = importlib.import_module(f"{__package__}.{file.stem}").OPTIONS
        assert found.keys().isdisjoint(table), f"{file.name} has names of another table"
        found |= table
        places |= {option: (file.stem, 2 * number >= len(table)) for number, option in enumerate(table)}
    return found, places


OPTIONS, PLACES = options()


def cases() -> list[Any]:
    """Every option in every layout; `make test` takes two options of each table, and each layout twice."""
    every = [(option, layout) for option in OPTIONS for layout in LAYOUTS]
    kept = cover(every, lambda case: {PLACES[case[0]], (case[1], PLACES[case[0]][1])})
    return [pytest.param(*case, marks=[] if case in kept else [pytest.mark.slow]) for case in every]


@pytest.fixture(scope="module")
def references() -> dict[str, Trajectory]:
    return {}


@pytest.mark.parametrize(("option", "layout"), cases())
def test_an_option_learns_the_same_in_every_layout(option, layout, tmp_path, references):
    num_ranks, parallel = LAYOUTS[layout]
    tree = settings(tmp_path, **OPTIONS[option])
    if option not in references:
        references[option] = reference(tree)
    for rank, found in enumerate(ranks(num_ranks, first_steps, {**tree, "parallel": parallel}, num_ranks)):
        assert differences(found, references[option]) == [], f"on rank {rank}"
