"""Small layouts show every pair of axes that a run splits over, in eight ranks at most."""

from itertools import combinations, product

import pytest

from megalith.config import load_run
from megalith.config.layout import Layout
from megalith.insight.verify.cover import AXES, MOST_RANKS, cover, degrees_to_show, missing_pairs, name_of, num_ranks
from tests.insight.verify.proofs import GPT2_RECIPE


def shown_of(num_query_groups: int = 8, **parallel: object) -> dict[str, tuple[int, ...]]:
    model = {**GPT2_RECIPE["model"], "num_query_groups": num_query_groups, "num_layers": 16}
    config = load_run({**GPT2_RECIPE, "model": model, "parallel": {"shard": 1, **parallel}})
    degrees = {axis: getattr(config.parallel, axis) for axis in AXES}
    return degrees_to_show(config, Layout.resolve(**degrees))


@pytest.mark.parametrize("num_axes", range(6))
def test_every_pair_and_every_degree_is_seen_in_eight_ranks(num_axes):
    for axes in combinations(AXES, num_axes):
        for degrees in product([(2,), (2, 4)], repeat=num_axes):
            shown = dict(zip(axes, degrees, strict=True))
            rows = cover(shown)
            assert all(num_ranks(row) <= MOST_RANKS for row in rows)
            assert missing_pairs(shown, rows) == []
            assert {item for row in rows for item in row.items()} == {(a, d) for a, ds in shown.items() for d in ds}


def test_five_axes_take_four_layouts_of_three_and_six_pairs_three_more():
    assert len(cover(dict.fromkeys(AXES, (2,)))) <= 5
    assert len(cover({})) == 0
    assert cover({"shard": (2,)}) == [{"shard": 2}]


def test_a_pair_that_needs_more_ranks_is_told():
    shown = {"tensor": (4,), "context": (4,), "shard": (2,)}
    assert missing_pairs(shown, cover(shown)) == [("tensor", "context")]


@pytest.mark.parametrize(
    ("parallel", "shown"),
    [
        ({}, {}),
        ({"tensor": 8, "replicate": 4, "shard": 2}, {"tensor": (2,), "replicate": (2,), "shard": (2,)}),
        ({"tensor": 8, "num_query_groups": 2}, {"tensor": (4,)}),
        ({"tensor": 8, "num_query_groups": 1}, {"tensor": (2,)}),
        ({"context": 2}, {"context": (2,)}),
        ({"context": 8}, {"context": (2, 4)}),
        ({"context": 8, "context_method": "all_to_all"}, {"context": (2,)}),
        ({"context": 4, "context_method": "two_level", "context_inner": 2}, {"context": (4,)}),
        ({"pipeline": 8}, {"pipeline": (2, 4)}),
        ({"pipeline": 8, "virtual": 2}, {"pipeline": (2,)}),
        ({"pipeline": 2}, {"pipeline": (2,)}),
    ],
)
def test_an_axis_is_shown_in_the_degrees_that_show_what_it_does(parallel, shown):
    assert shown_of(**parallel) == shown


def test_a_layout_is_named_by_its_axes():
    assert name_of({"tensor": 2, "shard": 4}) == "tensor 2 x shard 4"
    assert name_of({}) == "one rank"
