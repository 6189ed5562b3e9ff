"""capacity: dropped tokens, by loops over the tokens of each expert, and a fixed number of rows."""

import math

import pytest
import torch
from torch import Tensor

from megalith.config import RouterConfig
from megalith.transformer.layer_context import LayerContext
from megalith.transformer.moe.capacity import (
    capacity_of_real_tokens,
    drop_past_capacity,
    expert_capacity,
    fixed_row_map,
)
from megalith.transformer.moe.routing import Routing, choose_by_score
from tests.transformer.moe.routers import router_of, x_of

T, E, K = 48, 6, 2
ALL = torch.ones(T, dtype=torch.bool)


def routing_of(seed: int = 0, skew: float = 1.0) -> Routing:
    logits = torch.randn(T, E, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    logits[:, 0] += skew
    indices, weights = choose_by_score(logits, K, RouterConfig())
    return Routing(indices, weights, torch.bincount(indices.flatten(), minlength=E))


def tokens_of(indices: Tensor, expert: int) -> list[int]:
    return (indices == expert).any(dim=1).nonzero().flatten().tolist()


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25])
def test_the_first_tokens_or_those_of_the_greatest_weights_are_kept_and_their_weights_are_as_before(factor):
    whole, C = routing_of(), expert_capacity(T, K, E, factor)
    weight = torch.zeros(T, E, dtype=torch.float64).scatter_(1, whole.indices, whole.weights)
    for drop in ("position", "probability"):
        routing = drop_past_capacity(whole, C, drop, ALL)
        for e in range(E):
            tokens = tokens_of(whole.indices, e)
            order = tokens if drop == "position" else sorted(tokens, key=lambda t: -weight[t, e])
            assert tokens_of(routing.indices, e) == sorted(order[:C])
        kept = routing.indices < E
        assert torch.equal(routing.indices % E, whole.indices)
        assert torch.equal(routing.weights, torch.where(kept, whole.weights, 0.0))
        assert torch.equal(routing.tokens_per_expert, whole.tokens_per_expert)
    assert not kept.all()


def test_of_equal_weights_the_first_are_kept():
    indices, weights = torch.zeros(64, 1, dtype=torch.int64), torch.ones(64, 1)
    whole = Routing(indices, weights, torch.tensor([64]))
    for drop in ("position", "probability"):
        kept = drop_past_capacity(whole, 8, drop, torch.ones(64, dtype=torch.bool)).indices < 1
        assert tokens_of(~kept, 0) == list(range(8))


def test_padding_takes_no_room_of_others():
    whole, real = routing_of(), torch.arange(T) % 2 == 1
    routing = drop_past_capacity(whole, 5, "position", real)
    for e in range(E):
        assert tokens_of(routing.indices, e) == [t for t in tokens_of(whole.indices, e) if real[t]][:5]
    assert not routing.weights[~real].any()


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.1, 1.25, 4 / 3, 1.3333, 100.0])
@pytest.mark.parametrize(("num_experts", "top_k", "longest"), [(E, K, T), (8, 2, 4096), (128, 8, 131072)])
def test_the_capacity_of_real_tokens_is_that_of_as_many_without_padding(factor, num_experts, top_k, longest):
    for num_real in range(0, longest + 1, -(-longest // 50)):
        real = torch.arange(longest) < num_real
        found = capacity_of_real_tokens(real, top_k, num_experts, factor).item()
        assert found == expert_capacity(num_real, top_k, num_experts, factor)
        assert -1e-6 < found - factor * num_real * top_k / num_experts < 1.0 or found == num_real


def test_capacity_is_a_share_rounded_up_and_at_most_all_tokens():
    assert expert_capacity(10, 2, 8, 1.0) == 3
    assert expert_capacity(100, 3, 10, 1.1) == 33  # with a rounding error it would be 34
    assert math.ceil(1.1 * 100 * 3 / 10) == 34
    assert expert_capacity(64, 2, 4, 100.0) == 64
    assert expert_capacity(0, 2, 4, 1.0) == 0


def test_with_room_for_all_nothing_is_dropped():
    whole = routing_of(skew=10.0)
    for drop in ("position", "probability"):
        routing = drop_past_capacity(whole, expert_capacity(T, K, E, 1000.0), drop, ALL)
        assert torch.equal(routing.indices, whole.indices)
        assert torch.equal(routing.weights, whole.weights)


def test_the_weights_that_are_kept_have_their_gradients_and_the_others_none():
    whole = routing_of()
    weights = whole.weights.clone().requires_grad_()
    routing = drop_past_capacity(Routing(whole.indices, weights, whole.tokens_per_expert), 5, "probability", ALL)
    routing.weights.sum().backward()
    assert torch.equal(weights.grad, (routing.indices < E).double())


@pytest.mark.parametrize("skew", [1.0, 100.0])
def test_every_expert_has_the_same_number_of_rows_and_the_output_is_that_of_rows_as_many_as_chosen(skew):
    C = expert_capacity(T, K, E, 1.25)
    routing = drop_past_capacity(routing_of(skew=skew), C, "probability", ALL)
    rows = fixed_row_map(routing.indices, E, C)
    assert rows.rows_per_expert.tolist() == [C] * E
    for e in range(E):
        tokens = tokens_of(routing.indices, e)
        assert rows.token_of[e * C : (e + 1) * C].tolist() == tokens + [-1] * (C - len(tokens))
    x = torch.randn(T, 4, dtype=torch.float64)
    scale = torch.arange(1.0, E + 1, dtype=torch.float64)  # each expert multiplies by a factor
    by_hand = torch.zeros_like(x)
    for t in range(T):
        for k in range(K):
            if routing.indices[t, k] < E:
                by_hand[t] += routing.weights[t, k] * scale[routing.indices[t, k]] * x[t]
    slots = rows.row_of.long()  # [T, K]
    y = x[rows.token_of.clamp_min(0).long()] * scale.repeat_interleave(C)[:, None]
    got = (torch.where(slots[..., None] < 0, 0.0, y[slots]) * routing.weights[..., None]).sum(dim=1)
    torch.testing.assert_close(got, by_hand, rtol=1e-12, atol=1e-12)


def test_no_token_has_rows_too():
    rows = fixed_row_map(torch.zeros(0, K, dtype=torch.int64), E, 3)
    assert rows.token_of.tolist() == [-1] * (3 * E)
    assert rows.row_of.shape == (0, K)


def test_a_replayed_routing_is_cut_where_the_layer_pads_to_its_capacity():
    x, context = x_of(T), LayerContext()
    padded = router_of(experts=E, capacity={"factor": 0.75, "drop": "position", "pad": True})
    without_a_limit = router_of(experts=E)(x, context).indices
    found, own = padded(x, context, replayed=without_a_limit), padded(x, context)
    assert (own.indices >= E).any()
    assert torch.equal(found.indices, own.indices)
    torch.testing.assert_close(found.weights, own.weights, rtol=1e-12, atol=1e-12)
    assert torch.equal(padded(x, context, replayed=own.indices).indices, own.indices)
