"""Mixtures of experts learn what one process does, in generated layouts: float64, up to eight gloo ranks."""

from itertools import combinations, product

import pytest

from tests.rank_pool import ranks
from tests.sampling import cover
from tests.tiny_run import settings
from tests.training.moe_cover import (
    AXES,
    layouts,
    name_of,
    num_covering,
    pairs,
    settings_of,
    tree_of_one_process,
    world_size,
)
from tests.training.on_ranks import first_steps
from tests.training.reference import differences, reference

NUMBER, OF_FEW_RANKS = 60, 8
ROWS = layouts(NUMBER)
# each way of splitting and sending experts and tokens once, with few ranks, which wait for each other less
SPLITS = ("expert", "expert_tensor", "tensor", "context", "pipeline", "replicate", "shard", "method")
FIRST = cover(
    sorted(ROWS[: OF_FEW_RANKS * 3], key=world_size)[:OF_FEW_RANKS], lambda row: {(axis, row[axis]) for axis in SPLITS}
)
# a capacity drops some of the tokens that a rank has; one process cannot reproduce that
APART = {("tensor", 2), ("context", 2), ("router", "global")}


def test_every_pair_of_values_that_one_process_can_be_compared_in_is_covered():
    assert num_covering() <= NUMBER
    covered = set().union(*map(pairs, ROWS))
    axes = [
        axis for axis in AXES if axis not in ("expert", "expert_tensor", "method", "max_rows", "router", "capacity")
    ]
    for one, other in combinations(axes, 2):
        for values in product(AXES[one], AXES[other]):
            assert tuple(zip((one, other), values, strict=True)) in covered
    for value in APART:
        dropping = {
            pair for pair in covered if value in pair and any(n == "capacity" and v != "dropless" for n, v in pair)
        }
        assert dropping == set()


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=name_of(row), marks=() if row in FIRST else pytest.mark.slow) for row in ROWS]
)
def test_experts_learn_what_one_process_does(row, tmp_path):
    tree = settings(tmp_path, **settings_of(row))
    alone = tree_of_one_process(row, tree)
    if alone["train"]["micro_batch_size"] == alone["train"]["global_batch_size"]:
        want = reference(alone)
    else:
        [want] = ranks(1, first_steps, alone, 1)
    for rank, found in enumerate(ranks(world_size(row), first_steps, tree, world_size(row))):
        assert differences(found, want) == [], f"on rank {rank}"
