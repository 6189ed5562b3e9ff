"""Every layout computes what one process does, on generated layouts in which every two values of any two axes meet.

This file has those of the Llama's shape, test_layout_cover_gpt2.py the others, so that two workers can share them.
"""

from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from tests.rank_pool import ranks
from tests.sampling import cover
from tests.tiny_run import settings
from tests.training.layout_cover import AXES, MOST_RANKS, Row, layouts, name_of, num_covering, pairs, settings_of
from tests.training.layout_cover import world_size as ranks_of
from tests.training.on_ranks import first_steps
from tests.training.reference import differences, reference

NUMBER, OF_FEW_RANKS = 200, 25
DEGREES = ("tensor", "context", "pipeline", "replicate", "shard")


def test_every_pair_of_values_that_fits_is_in_one_of_the_covering_layouts():
    covering = set().union(*(pairs(row) for row in layouts(NUMBER)[: num_covering()]))
    for (one, values), (other, other_values) in combinations(AXES.items(), 2):
        for pair in product(values, other_values):
            # only the product of degrees matters; the settings refuse the rest, or they require other settings
            named = {one: pair[0], other: pair[1]}
            if {one, other} <= set(DEGREES) and pair[0] * pair[1] <= MOST_RANKS:
                assert tuple(named.items()) in covering, named
    assert len(covering) > 800


def rows_of(shape: str) -> list[Any]:
    """The layouts of a model of ``shape``; `make test` takes those that are the first to have some value of some axis.

    They are chosen among the layouts of four ranks and the first of eight, the only one with two-level context.
    """
    rows = layouts(NUMBER)
    kept = cover(rows[:OF_FEW_RANKS], values_of)
    return [
        pytest.param(row, id=name_of(row), marks=() if row in kept else pytest.mark.slow)
        for row in rows
        if row["shape"] == shape
    ]


def values_of(row: Row) -> set[Any]:
    """The axis values that occur in any pair of a row; settings that do not apply to it are left out."""
    return {item for pair in pairs(row) for item in pair}


def check(row: Row, folder: Path) -> None:
    tree = settings(folder, **settings_of(row))
    want = reference({name: group for name, group in tree.items() if name != "parallel"})
    for rank, found in enumerate(ranks(ranks_of(row), first_steps, tree, ranks_of(row))):
        assert differences(found, want) == [], f"on rank {rank}"


@pytest.mark.parametrize("row", rows_of("llama"))
def test_a_llama_computes_what_one_process_does(row, tmp_path):
    check(row, tmp_path)
