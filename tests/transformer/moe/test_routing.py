"""routing: the chosen experts and their weights, against loops in numpy."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from megalith.config import RouterConfig
from megalith.transformer.moe.routing import (
    choose_by_score,
    choose_in_turn,
    largest_of_rows,
    router_logits,
    sinkhorn,
    weights_of,
)
from tests.transformer.moe import oracle

EXACT = 1e-12
SCORES = {
    "softmax": {},
    "pre_softmax": {"pre_softmax": True},
    "sigmoid": {"score_function": "sigmoid"},
    "sqrtsoftplus": {"score_function": "sqrtsoftplus"},
}
GROUPS: dict[str, dict[str, int]] = {
    "no groups": {},
    "2 of 4 groups": {"num_groups": 4, "group_topk": 2},
    "3 of 4 groups by their best": {"num_groups": 4, "group_topk": 3, "group_score_topk": 1},
}


def logits_of(T: int, E: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(T, E, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("score", SCORES)
def test_experts_and_weights_are_those_of_loops_over_tokens(score, top_k, groups):
    settings = GROUPS[groups]
    if (score == "softmax" and top_k == 1) or (groups == "2 of 4 groups" and top_k == 1):
        return  # refused: one weight of 1, or half an expert per group
    logits = logits_of(40, 16)
    for biased, scale in itertools.product((False, True), (1.0, 2.5)):
        if biased and "softmax" in score:
            continue  # refused
        bias = torch.linspace(-0.5, 0.5, 16, dtype=torch.float64) if biased else None
        router = RouterConfig(**SCORES[score], **settings, scaling_factor=scale)
        indices, weights = choose_by_score(logits, top_k, router, bias)
        chosen, wanted = oracle.route(
            logits.numpy(),
            top_k,
            score="softmax" if "softmax" in score else score,
            pre_softmax=score == "pre_softmax",
            bias=None if bias is None else bias.numpy(),
            groups=settings.get("num_groups"),
            group_topk=settings.get("group_topk", 1),
            group_score_topk=settings.get("group_score_topk"),
            scale=scale,
        )
        assert indices.tolist() == chosen.tolist()
        np.testing.assert_allclose(weights.numpy(), wanted, rtol=EXACT)


def test_softmax_over_all_and_divided_by_the_sum_of_the_chosen_is_softmax_over_the_chosen():
    logits = logits_of(30, 12)
    indices, before = choose_by_score(logits, 3, RouterConfig(pre_softmax=True))
    same, after = choose_by_score(logits, 3, RouterConfig())
    assert torch.equal(indices, same)
    torch.testing.assert_close(before / before.sum(dim=1, keepdim=True), after, rtol=EXACT, atol=EXACT)


def test_weights_sum_up_to_the_scaling_factor_unless_one_expert_keeps_its_score():
    logits = logits_of(30, 12)
    for settings in (SCORES["softmax"], SCORES["sigmoid"], SCORES["sqrtsoftplus"]):
        _, weights = choose_by_score(logits, 4, RouterConfig(**settings, scaling_factor=2.5))
        torch.testing.assert_close(weights.sum(dim=1), torch.full((30,), 2.5, dtype=torch.float64), rtol=EXACT, atol=0)
    indices, weights = choose_by_score(logits, 1, RouterConfig(score_function="sigmoid"))
    torch.testing.assert_close(weights, logits.sigmoid().gather(1, indices), rtol=EXACT, atol=0)


def test_a_bias_chooses_and_leaves_the_weight_alone():
    logits, bias = logits_of(30, 12), torch.zeros(12)
    bias[5] = 100.0
    indices, weights = choose_by_score(logits, 1, RouterConfig(score_function="sigmoid"), bias)
    assert (indices == 5).all()
    torch.testing.assert_close(weights[:, 0], logits[:, 5].sigmoid(), rtol=EXACT, atol=0)


def test_the_experts_of_a_token_are_in_as_many_groups_as_allowed():
    router = RouterConfig(num_groups=8, group_topk=3)
    indices, _ = choose_by_score(logits_of(1000, 32), 6, router)
    assert max(len({e // 4 for e in row}) for row in indices.tolist()) == 3


@pytest.mark.parametrize("score", SCORES)
def test_the_weights_of_a_choice_are_those_of_experts_that_are_given_in_any_order(score):
    logits, router = logits_of(30, 12), RouterConfig(**SCORES[score], scaling_factor=1.5)
    indices, weights = choose_by_score(logits, 3, router)
    shuffled = weights_of(logits, indices.flip(1), router)
    torch.testing.assert_close(shuffled, weights.flip(1), rtol=EXACT, atol=EXACT)
    dropped = torch.where(torch.arange(3) == 1, indices + 12, indices)
    wanted = torch.where(torch.arange(3) == 1, 0.0, weights)
    torch.testing.assert_close(weights_of(logits, dropped, router), wanted, rtol=EXACT, atol=EXACT)
    huge = torch.tensor([[-2000.0, 2000.0, 0.0]])
    assert weights_of(huge, torch.tensor([[0, 1]]), router).isfinite().all()


@pytest.mark.parametrize("selection", ["top_k", "sinkhorn"])
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("score", SCORES)
def test_gradients_of_the_weights_are_those_of_finite_differences(score, top_k, selection):
    if (selection == "sinkhorn" and score != "softmax") or (selection == "top_k" and (score, top_k) == ("softmax", 1)):
        return
    router = RouterConfig(**SCORES[score], selection=selection, scaling_factor=2.0)
    # far from ties, which a finite difference could cross
    logits = torch.stack([torch.randperm(6).double() for _ in range(4)]).requires_grad_()
    indices = largest_of_rows(logits, top_k)
    assert torch.autograd.gradcheck(lambda x: weights_of(x, indices, router), logits)
    if selection == "top_k":
        assert torch.autograd.gradcheck(lambda x: choose_by_score(x, top_k, router)[1], logits)


def test_sinkhorn_weighs_by_sigmoid_or_by_softmax_over_all():
    logits, router = logits_of(10, 6), RouterConfig(selection="sinkhorn")
    one, two = largest_of_rows(logits, 1), largest_of_rows(logits, 2)
    torch.testing.assert_close(weights_of(logits, one, router), logits.sigmoid().gather(1, one))
    torch.testing.assert_close(weights_of(logits, two, router), logits.softmax(1).gather(1, two))


def test_sinkhorn_gives_every_token_and_every_expert_its_share():
    balanced = sinkhorn(logits_of(64, 8), torch.ones(64, dtype=torch.bool)).exp()
    torch.testing.assert_close(balanced.sum(dim=1) * 64, torch.ones(64, dtype=torch.float64), rtol=1e-3, atol=0)
    torch.testing.assert_close(balanced.sum(dim=0) * 8, torch.ones(8, dtype=torch.float64), rtol=1e-3, atol=0)


def test_sinkhorn_is_the_iteration_of_the_paper():
    logits = logits_of(12, 4)
    costs, rows, columns = np.exp(logits.numpy()), np.ones(12), np.ones(4)
    for _ in range(32):
        rows = 1 / (12 * (costs @ columns))
        columns = 1 / (4 * (costs.T @ rows))
    got = sinkhorn(logits, torch.ones(12, dtype=torch.bool)).exp()
    np.testing.assert_allclose(got.numpy(), rows[:, None] * costs * columns, rtol=1e-9)


def test_sinkhorn_of_huge_logits_is_a_number():
    for dtype in (torch.float32, torch.float64):
        logits = 1000 * logits_of(64, 8).to(dtype)
        assert sinkhorn(logits, torch.ones(64, dtype=torch.bool)).isfinite().all()


def test_padding_has_no_share_in_sinkhorns_balance():
    logits, real = logits_of(20, 4), torch.arange(20) % 3 != 0
    padded = sinkhorn(logits, real)
    alone = sinkhorn(logits[real], torch.ones(int(real.sum()), dtype=torch.bool))
    torch.testing.assert_close(padded[real], alone, rtol=EXACT, atol=EXACT)


def test_in_turn_every_expert_gets_the_same_number_of_tokens():
    indices = choose_in_turn(torch.arange(24), 2, 8)
    assert indices[:5].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [0, 1]]
    assert torch.bincount(indices.flatten(), minlength=8).tolist() == [6] * 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_logits_are_wide_whatever_the_features_are(dtype):
    x, weight = logits_of(9, 16).to(dtype).requires_grad_(), logits_of(5, 16, 1).to(dtype).requires_grad_()
    bias = torch.linspace(-1, 1, 5, dtype=torch.float64).to(dtype).requires_grad_()
    logits = router_logits(x, weight, bias)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert logits.dtype == wide
    exact = [each.detach().double().requires_grad_() for each in (x, weight, bias)]
    wanted = exact[0] @ exact[1].t() + exact[2]
    torch.testing.assert_close(logits.double(), wanted, rtol=1e-5, atol=1e-5)  # in bfloat16 it would be 1e-2
    dy = logits_of(9, 5, 2).to(wide)
    got = torch.autograd.grad(logits, (x, weight, bias), dy)
    assert [each.dtype for each in got] == [dtype] * 3
    for mine, theirs in zip(got, torch.autograd.grad(wanted, exact, dy.double()), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_no_tokens_have_a_routing_too():
    router = RouterConfig()
    indices, weights = choose_by_score(torch.zeros(0, 8), 2, router)
    assert indices.shape == weights.shape == weights_of(torch.zeros(0, 8), indices, router).shape == (0, 2)
    assert sinkhorn(torch.zeros(0, 8), torch.zeros(0, dtype=torch.bool)).shape == (0, 8)
