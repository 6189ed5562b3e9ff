"""moe_rules: a setting is refused as without effect where nothing can come of it, and not where something can."""

from fractions import Fraction
from itertools import combinations
from typing import Any

import pytest

from megalith.config import violations
from megalith.config.settings_tree import applied, plain_tree
from megalith.transformer.moe.capacity import expert_capacity
from tests.config.mistakes import VALID

E = 12


def refusals(world_size: int, **changes: Any) -> list[str]:
    dotted = {name.replace("__", "."): value for name, value in changes.items()}
    tree = plain_tree(applied(VALID, {"model.moe.num_experts": E, **dotted}))
    return violations(tree, world_size)


@pytest.mark.parametrize("top_k", [1, 2, 5, 12])
@pytest.mark.parametrize("expert", [1, 2, 4, 12])
def test_a_bound_of_rows_is_refused_from_the_most_on_that_any_choice_of_experts_gives_a_rank(expert, top_k):
    # loads of several tokens are sums, so that no mean of theirs is greater than the greatest of one
    here = E // expert
    most = max(
        Fraction(sum(e < here for e in chosen) * expert, top_k)  # of rank 0, against an even share of top_k
        for chosen in combinations(range(E), top_k)
    )
    moe = {"model__moe__top_k": top_k, "model__moe__router__pre_softmax": top_k == 1}
    # of twelve experts no greatest share has a short decimal but a whole one: 0.001 is less than any difference
    below, above = float(int(most * 1000) - 1) / 1000, float(int(most * 1000) + 1) / 1000
    parallel = {"parallel__expert": expert, "train__global_batch_size": 24}
    assert refusals(expert, parallel__dispatch__max_rows=below, **parallel, **moe) == []
    [refusal] = refusals(expert, parallel__dispatch__max_rows=above, **parallel, **moe)
    assert f"has no effect: a rank of parallel.expert={expert} has at most {float(most):.4g} times" in refusal


@pytest.mark.parametrize("top_k", [2, 5, 12])
def test_a_capacity_is_refused_from_where_on_no_expert_drops_a_token(top_k):
    greatest = [factor / 100 for factor in range(90, 700)]
    # an expert may be chosen by each of a million tokens
    dropping = [factor for factor in greatest if expert_capacity(1_000_000, top_k, E, factor) < 1_000_000]
    moe = {"model__moe__top_k": top_k}
    for factor in greatest[::7]:
        assert (refusals(1, model__moe__capacity__factor=factor, **moe) == []) == (factor in dropping), factor
    assert refusals(1, model__moe__capacity__factor=6.5, model__moe__capacity__pad=True, **moe) == []


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        (2, {"parallel__expert": 2}),
        (2, {"parallel__tensor": 2, "parallel__sequence": True}),  # parts of each expert
        (2, {"parallel__expert_tensor": 2}),
    ],
)
def test_all_tokens_may_be_gathered_wherever_there_is_another_rank_to_gather_from(world_size, changes):
    assert refusals(world_size, parallel__dispatch__method="all_gather", **changes) == []


def test_experts_in_a_module_that_predicts_ahead_alone_are_experts():
    layers = [*[False] * 4, True]  # VALID has four layers
    assert len(refusals(1, model__moe__layers=layers)) == 1
    assert refusals(1, model__moe__layers=layers, model__mtp__num_modules=1) == []
