"""moe_rules: a setting is refused as without effect exactly if it cannot change anything."""

from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.config import RouterConfig, violations
from megalith.config.settings_tree import applied, plain_tree
from megalith.transformer.layer_context import LayerContext
from megalith.transformer.moe.capacity import expert_capacity
from megalith.transformer.moe.routing import Routing, choose_by_score
from tests.config.mistakes import VALID
from tests.transformer.moe.routers import router_of, x_of

E = 12
CONTEXT = LayerContext()


def refusals(world_size: int, **changes: Any) -> list[str]:
    dotted = {name.replace("__", "."): value for name, value in changes.items()}
    tree = plain_tree(applied(VALID, {"model.moe.num_experts": E, **dotted}))
    return violations(tree, world_size)


@pytest.mark.parametrize("top_k", [1, 2, 5, 12])
@pytest.mark.parametrize("expert", [1, 2, 4, 12])
def test_a_bound_of_rows_is_refused_from_the_most_on_that_any_choice_of_experts_gives_a_rank(expert, top_k):
    # the loads of several tokens are sums, so their mean never exceeds the maximum for one token
    here = E // expert
    most = max(
        Fraction(sum(e < here for e in chosen) * expert, top_k)  # on rank 0, relative to an even share of top_k
        for chosen in combinations(range(E), top_k)
    )
    moe = {"model__moe__top_k": top_k, "model__moe__router__pre_softmax": top_k == 1}
    # for twelve experts, a maximum share is an integer or has no short decimal, so 0.001 is less than any difference
    below, above = float(int(most * 1000) - 1) / 1000, float(int(most * 1000) + 1) / 1000
    parallel = {"parallel__expert": expert, "train__global_batch_size": 24}
    assert refusals(expert, parallel__dispatch__max_rows=below, **parallel, **moe) == []
    [refusal] = refusals(expert, parallel__dispatch__max_rows=above, **parallel, **moe)
    assert f"has no effect: with parallel.expert={expert} and " in refusal
    assert f"a rank receives at most {float(most):.4g} times the rows" in refusal


@pytest.mark.parametrize("top_k", [2, 5, 12])
def test_a_capacity_is_refused_from_where_on_no_expert_drops_a_token(top_k):
    greatest = [factor / 100 for factor in range(90, 700)]
    # all of a million tokens may choose the same expert
    dropping = [factor for factor in greatest if expert_capacity(1_000_000, top_k, E, factor) < 1_000_000]
    moe = {"model__moe__top_k": top_k}
    for factor in greatest[::7]:
        assert (refusals(1, model__moe__capacity__factor=factor, **moe) == []) == (factor in dropping), factor
    assert refusals(1, model__moe__capacity__factor=6.5, model__moe__capacity__pad=True, **moe) == []


@pytest.mark.parametrize(("factor", "room_for_all"), [(6.4, False), (6.5, True), (9.0, True)])
@pytest.mark.parametrize("drop", ["position", "probability"])
def test_which_tokens_are_dropped_is_refused_where_padded_experts_have_room_for_all(drop, factor, room_for_all):
    capacity = {"model__moe__capacity__factor": factor, "model__moe__capacity__pad": True}
    capacity_of_a_million = expert_capacity(1_000_000, 2, 13, factor)
    assert (capacity_of_a_million == 1_000_000) == room_for_all
    found = refusals(1, model__moe__num_experts=13, model__moe__capacity__drop=drop, **capacity)
    assert ["has no effect" in refusal for refusal in found] == [True] * room_for_all
    assert refusals(1, model__moe__num_experts=13, **capacity) == []


def group_settings() -> Iterator[tuple[int, dict[str, int]]]:
    """Every top_k and number of groups that a router with eight experts can have."""
    for top_k, num_groups in product(range(1, 9), (1, 2, 4, 8)):
        for kept, scored in product(range(1, num_groups + 1), (None, *range(1, 8 // num_groups + 1))):
            if top_k <= kept * (8 // num_groups) and (scored is not None or top_k % kept == 0):
                given = {"num_groups": num_groups, "group_topk": kept, "group_score_topk": scored}
                yield top_k, {name: value for name, value in given.items() if value is not None}


def test_groups_are_refused_where_no_token_chooses_otherwise_than_without_them():
    logits = 2 * torch.randn(4_000, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for top_k, groups in group_settings():
        router = RouterConfig(score_function="sigmoid", **groups)
        chosen, _ = choose_by_score(logits, top_k, router)
        freely, _ = choose_by_score(logits, top_k, RouterConfig(score_function="sigmoid"))
        changes = {f"model__moe__router__{name}": value for name, value in groups.items()}
        changes |= {"model__moe__num_experts": 8, "model__moe__top_k": top_k}
        found = refusals(1, model__moe__router__score_function="sigmoid", **changes)
        assert ["has no effect" in refusal for refusal in found] == [True] * torch.equal(chosen, freely), (
            top_k,
            groups,
        )


@pytest.mark.parametrize("selection", ["round_robin", "sinkhorn"])
@pytest.mark.parametrize("num_experts", [1, 4])
def test_a_selection_of_all_experts_is_refused_where_it_routes_as_the_best_scores_do(num_experts, selection):
    x, top_k = x_of(16), num_experts
    score = "sigmoid" if num_experts == 1 else "softmax"  # softmax over one expert is refused
    by_score = router_of(experts=num_experts, top_k=top_k, score_function=score)(x, CONTEXT)
    own_score = "softmax" if selection == "sinkhorn" else score  # which computes its own weights
    given = {"selection": selection, "score_function": own_score}
    routing = router_of(experts=num_experts, top_k=top_k, **given)(x, CONTEXT)

    def weight_of_each(found: Routing) -> Tensor:
        return torch.zeros(16, num_experts, dtype=torch.float64).scatter(1, found.indices, found.weights)

    torch.testing.assert_close(weight_of_each(routing), weight_of_each(by_score), rtol=1e-12, atol=1e-12)
    changes = {f"model__moe__router__{name}": value for name, value in given.items()}
    sizes = {"model__moe__num_experts": num_experts, "model__moe__top_k": top_k}
    found = refusals(1, **sizes, **changes)
    # Sinkhorn's weight of a single expert is a sigmoid with score_function=softmax, which is refused for best scores
    only_so = selection == "sinkhorn" and num_experts == 1
    assert ["has no effect" in refusal for refusal in found] == ([] if only_so else [True])
    # with one more expert than is chosen, some token may not choose it
    assert refusals(1, **{**sizes, "model__moe__num_experts": num_experts + 1}, **changes) == []


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
