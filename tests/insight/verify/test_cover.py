"""Small layouts cover every pair of axes that a run splits over, with at most eight ranks."""

from itertools import combinations, product

import pytest

from megalith.config import load_run
from megalith.config.layout import Layout
from megalith.insight.verify.cover import (
    AXES,
    MOST_RANKS,
    cover,
    degrees_to_show,
    is_layout,
    missing_pairs,
    name_of,
    num_ranks,
)
from tests.insight.verify.proofs import GPT2_RECIPE


def shown_of(num_query_groups: int = 8, **parallel: object) -> dict[str, tuple[int, ...]]:
    model = {**GPT2_RECIPE["model"], "num_query_groups": num_query_groups, "num_layers": 16}
    config = load_run({**GPT2_RECIPE, "model": model, "parallel": {"shard": 1, **parallel}})
    degrees = {axis: getattr(config.parallel, axis) for axis in AXES}
    return degrees_to_show(config, Layout.resolve(**degrees))


OF_RANKS = AXES[:5]  # without the axes of experts, which are folded over them


@pytest.mark.parametrize("num_axes", range(6))
def test_every_pair_and_every_degree_is_seen_in_eight_ranks(num_axes):
    for axes in combinations(OF_RANKS, num_axes):
        for degrees in product([(2,), (2, 4)], repeat=num_axes):
            shown = dict(zip(axes, degrees, strict=True))
            rows = cover(shown)
            assert all(num_ranks(row) <= MOST_RANKS for row in rows)
            assert missing_pairs(shown, rows) == []
            assert {item for row in rows for item in row.items()} == {(a, d) for a, ds in shown.items() for d in ds}


def test_five_axes_take_four_layouts_of_three_and_six_pairs_three_more():
    assert len(cover(dict.fromkeys(OF_RANKS, (2,)))) <= 5
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
        (
            {"tensor": 4, "num_query_groups": 2, "context": 4, "context_method": "two_level", "context_inner": 2},
            {"tensor": (2, 4), "context": (4,)},
        ),
        ({"pipeline": 8}, {"pipeline": (2, 4)}),
        ({"pipeline": 8, "virtual": 2}, {"pipeline": (2,)}),
        ({"pipeline": 2}, {"pipeline": (2,)}),
    ],
)
def test_an_axis_is_shown_in_the_degrees_that_show_what_it_does(parallel, shown):
    assert shown_of(**parallel) == shown


def shown_of_experts(**parallel: object) -> dict[str, tuple[int, ...]]:
    model = {**GPT2_RECIPE["model"], "num_layers": 16, "moe": {"num_experts": 8}}
    degrees = {"sequence": parallel.get("tensor", 1) > 1, "shard": 1, **parallel}
    config = load_run({**GPT2_RECIPE, "model": model, "parallel": degrees})
    named = {name: size for name, size in degrees.items() if name in AXES}
    return degrees_to_show(config, Layout.resolve(**named))


@pytest.mark.parametrize(
    ("parallel", "shown"),
    [
        ({"shard": 8, "expert": 8}, {"shard": (2,), "expert": (2,)}),
        ({"tensor": 4}, {"tensor": (2,), "expert_tensor": (2,)}),
        ({"tensor": 4, "expert_tensor": 1}, {"tensor": (2,)}),
        ({"shard": 8, "expert": 4, "expert_tensor": 2}, {"shard": (4,), "expert": (2,), "expert_tensor": (2,)}),
    ],
)
def test_experts_are_split_over_ranks_of_the_other_axes(parallel, shown):
    assert shown_of_experts(**parallel) == shown
    rows = cover(shown)
    assert missing_pairs(shown, rows) == []
    assert all(map(is_layout, rows))


def test_all_axes_are_seen_together_with_those_of_experts():
    shown = dict.fromkeys(AXES, (2,))
    rows = cover(shown)
    assert missing_pairs(shown, rows) == []
    assert len(rows) <= 8


def test_ranks_are_those_of_the_axes_beneath_experts():
    assert num_ranks({"tensor": 2, "shard": 2, "expert": 4}) == 4
    assert is_layout({"tensor": 2, "shard": 2, "expert": 4})
    assert not is_layout({"expert": 2})
    assert not is_layout({"pipeline": 2, "shard": 2, "expert": 2, "expert_tensor": 2})


def test_a_layout_is_named_by_its_axes():
    assert name_of({"tensor": 2, "shard": 4}) == "tensor 2 x shard 4"
    assert name_of({}) == "one rank"
