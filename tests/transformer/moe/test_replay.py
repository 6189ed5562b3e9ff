"""router: a replayed routing uses the experts of an earlier one, and invalid routings are refused."""

import pytest
import torch

from megalith.errors import ShapeError
from megalith.transformer.layer_context import LayerContext
from tests.transformer.moe.routers import H, router_of, x_of

EXACT = 1e-12
S, B, E, K = 12, 2, 8, 2
CONTEXT = LayerContext()


@pytest.mark.parametrize(
    "settings", [{}, {"score_function": "sigmoid", "expert_bias_update_rate": 0.0}, {"pre_softmax": True}]
)
def test_a_routing_that_is_replayed_has_the_same_experts_and_new_weights(settings):
    router, other = router_of(**settings), router_of(**settings)
    indices = router(x_of(S, B), CONTEXT).indices
    with torch.no_grad():
        other.weight.mul_(-0.5)
    own = other(x_of(S, B), CONTEXT)
    assert not torch.equal(own.indices, indices)
    routing = other(x_of(S, B), CONTEXT, replayed=indices)
    assert torch.equal(routing.indices, indices)
    scores = x_of(S, B).view(-1, H) @ other.weight.t()
    scores = {"softmax": lambda: scores.exp(), "sigmoid": lambda: scores.sigmoid()}[other.router.score_function]()
    over = scores.sum(dim=1, keepdim=True) if settings.get("pre_softmax") else scores.gather(1, indices).sum(1, True)
    torch.testing.assert_close(routing.weights, scores.gather(1, indices) / over, rtol=EXACT, atol=EXACT)
    routing.weights[:, 0].sum().backward()
    assert other.weight.grad.any()


def test_a_replayed_routing_drops_what_was_dropped_and_nothing_else():
    capacity = {"factor": 0.75, "drop": "probability"}
    router = router_of(capacity=capacity)
    first = router(x_of(S, B), CONTEXT)
    assert (first.indices >= E).any()
    same = router(x_of(S, B), CONTEXT, replayed=first.indices)
    assert torch.equal(same.indices, first.indices)
    torch.testing.assert_close(same.weights, first.weights, rtol=EXACT, atol=EXACT)
    assert torch.equal(same.tokens_per_expert, first.tokens_per_expert)
    assert torch.equal(router_of()(x_of(S, B), CONTEXT).tokens_per_expert, first.tokens_per_expert)
    # choices above an expert's capacity are not dropped: generation had no capacity, or other tokens in the batch
    more = router_of()(x_of(S, B), CONTEXT)
    again = router(x_of(S, B), CONTEXT, replayed=more.indices)
    assert torch.equal(again.indices, more.indices)
    assert again.weights.all()


@pytest.mark.parametrize("index", [-1, 2 * E, 10**9])
@pytest.mark.parametrize("settings", [{}, {"capacity": {"factor": 0.75, "pad": True}}], ids=["dropless", "padded"])
def test_what_is_no_expert_is_refused_in_a_replayed_routing(index, settings):
    router = router_of(**settings)
    replayed = router(x_of(S, B), CONTEXT).indices.clone()
    replayed[7, 1] = index
    with pytest.raises(
        ShapeError, match=rf"replayed must hold expert indices from 0 to 7, or 8 \+ e .*; got {index}; if a token"
    ):
        router(x_of(S, B), CONTEXT, replayed=replayed)


@pytest.mark.parametrize("dropped", [0, E])
def test_an_expert_that_a_token_names_twice_is_refused_in_a_replayed_routing(dropped):
    router = router_of()
    replayed = router(x_of(S, B), CONTEXT).indices.clone()
    replayed[7, 1] = replayed[7, 0] + dropped
    with pytest.raises(ShapeError, match=r"must hold distinct experts for each token; got \[.*\] for token 7"):
        router(x_of(S, B), CONTEXT, replayed=replayed)


def test_a_token_that_is_said_to_have_one_expert_has_its_other_choice_dropped():
    router = router_of()
    first = router(x_of(S, B), CONTEXT)
    replayed = first.indices.clone()
    replayed[7, 1] += E
    routing = router(x_of(S, B), CONTEXT, replayed=replayed)
    want = first.weights.clone()
    want[7, 1] = 0.0
    torch.testing.assert_close(routing.weights, want, rtol=EXACT, atol=EXACT)


def test_no_tokens_are_replayed_too():
    nothing = torch.zeros(0, K, dtype=torch.int64)
    assert router_of()(x_of(0, B), CONTEXT, replayed=nothing).indices.shape == (0, K)
