"""router in one process: evaluation, padding, replay, and what a step records."""

from random import Random

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megalith.errors import ShapeError
from megalith.fusions.core.dispatch import use
from megalith.parallel.parameters import state_tensors
from megalith.transformer.layer_context import LayerContext
from megalith.transformer.moe.router import TopKRouter
from megalith.transformer.moe.routing import Routing, router_logits
from megalith.transformer.step_record import StepRecord
from tests.transformer.moe import oracle
from tests.transformer.moe.routers import LAYER, H, keyed, router_of, x_of
from tests.transformer.shapes import config

EXACT = 1e-12
S, B, E, K = 12, 2, 8, 2
CONTEXT = LayerContext()
IDS = torch.arange(S * B).view(B, S).t()  # [S, B]
BALANCE = {"sequence_balance": 0.3, "micro_batch_balance": 0.2, "global_balance": 0.1, "z_loss": 0.05}


def weight_gradient(router: TopKRouter, record: StepRecord | None, *micro_batches: Tensor) -> Tensor:
    """d(router.weight) of the losses alone: the experts' weights are in no other loss."""
    for index, x in enumerate(micro_batches):
        context = LayerContext(record=None if record is None else record.micro_batch(index))
        (0.0 * router(x, context).weights).sum().backward()
    return router.weight.grad


def test_routing_is_that_of_loops_over_tokens():
    router, x = router_of(), x_of(S, B)
    routing = router(x, CONTEXT)
    logits = x.view(S * B, H) @ router.weight.t()
    chosen, weights = oracle.route(logits.detach().numpy(), K)
    assert routing.indices.tolist() == chosen.tolist()
    np.testing.assert_allclose(routing.weights.detach().numpy(), weights, rtol=EXACT)
    assert routing.tokens_per_expert.tolist() == np.bincount(chosen.flatten(), minlength=E).tolist()


def test_narrow_features_are_routed_by_scores_in_float32():
    router = router_of(build={"dtype": torch.bfloat16}, sequence_balance=0.1)
    x = x_of(S, B).bfloat16().requires_grad_()
    routing = router(x, CONTEXT)
    assert routing.weights.dtype == torch.float32
    logits = x.detach().double().view(S * B, H) @ router.weight.detach().double().t()
    chosen, weights = oracle.route(logits.numpy(), K)
    assert routing.indices.tolist() == chosen.tolist()
    np.testing.assert_allclose(routing.weights.detach().numpy(), weights, rtol=1e-5)
    routing.weights[:, 0].sum().backward()
    assert (x.grad.dtype, router.weight.grad.dtype) == (torch.bfloat16, torch.bfloat16)


def test_a_bias_of_the_logits_is_in_the_weights_and_learns():
    router = router_of(bias=True)
    with torch.no_grad():
        router.bias.copy_(torch.linspace(-1, 1, E))
    routing = router(x_of(S), CONTEXT)
    logits = router_logits(x_of(S).view(S, H), router.weight, router.bias)
    chosen, weights = oracle.route(logits.detach().numpy(), K)
    assert routing.indices.tolist() == chosen.tolist()
    np.testing.assert_allclose(routing.weights.detach().numpy(), weights, rtol=EXACT)
    routing.weights[:, 0].sum().backward()
    assert router.bias.grad.any()


def test_losses_are_those_of_loops_over_the_real_tokens_each_with_its_weight():
    x, mask = x_of(S, B), torch.arange(S * B).view(S, B) % 5 != 2
    tokens = [t for t in range(S * B) if mask.view(-1)[t]]
    router = router_of(**BALANCE)
    record = StepRecord(2.0)
    routing = router(x, LayerContext(record=record.micro_batch(0)), padding_mask=mask)
    routing.weights.sum().backward(torch.zeros((), dtype=torch.float64))

    logits = (x.view(S * B, H) @ router.weight.t()).detach()
    per_sequence = [[t for t in tokens if t % B == b] for b in range(B)]
    whole = oracle.switch_loss(logits.numpy(), routing.indices.tolist(), "softmax", tokens)
    each = [oracle.switch_loss(logits.numpy(), routing.indices.tolist(), "softmax", own) for own in per_sequence]
    wanted = {
        "sequence_balance": np.mean(each),
        "micro_batch_balance": whole,
        "global_balance": whole,
        "z_loss": oracle.z_loss(logits.numpy(), tokens),
    }
    for name, value in wanted.items():
        assert record.loss(name, LAYER).item() == pytest.approx(value, rel=EXACT), name
    counts = np.bincount(routing.indices[tokens].flatten(), minlength=E).tolist()
    assert routing.tokens_per_expert.tolist() == record.tokens_per_expert(LAYER).tolist() == counts

    weight = router.weight.detach().clone().requires_grad_()
    again = x.view(S * B, H) @ weight.t()
    P, C = again.softmax(dim=1), torch.zeros(S * B, E, dtype=torch.float64).scatter_(1, routing.indices, 1.0)

    def loss(own: list[int]) -> Tensor:
        return E / (K * len(own) ** 2) * (P[own].sum(0) * C[own].sum(0)).sum()

    total = 0.3 * torch.stack([loss(own) for own in per_sequence]).mean() + (0.2 + 0.1) * loss(tokens)
    total = total + 0.05 * again[tokens].logsumexp(1).square().mean()
    (2.0 * total).backward()
    torch.testing.assert_close(router.weight.grad, weight.grad, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("balance", BALANCE)
def test_four_micro_batches_have_the_mean_of_their_losses(balance):
    micro_batches = [x_of(S, B, seed) for seed in range(4)]
    got = weight_gradient(router_of(**{balance: 1.0}), StepRecord(1 / 4), *micro_batches)
    choices, wanted = torch.zeros(E, dtype=torch.float64), torch.zeros_like(got)
    for index, x in enumerate(micro_batches):
        if balance != "global_balance":
            wanted += weight_gradient(router_of(**{balance: 1.0}), None, x) / 4
            continue
        router = router_of()
        routing = router(x, CONTEXT)
        choices += routing.tokens_per_expert
        scores = (x.view(S * B, H) @ router.weight.t()).softmax(dim=1).sum(dim=0)
        loss = E / (K * S * B * (index + 1) * S * B) * (scores * choices).sum()  # with the loads so far
        (loss / 4).backward()
        wanted += router.weight.grad
    torch.testing.assert_close(got, wanted, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("selection", ["top_k", "quantile", "sinkhorn"])
def test_a_layer_that_is_computed_again_counts_once_and_has_the_same_gradient(selection, reentrant):
    losses = {"z_loss": 0.1} if selection != "top_k" else BALANCE
    results = []
    for again in (False, True):
        router, record = router_of(selection=selection, **losses), StepRecord(0.5)
        inputs = [x_of(S, B, seed).requires_grad_() for seed in range(2)]
        outputs = []
        for index, x in enumerate(inputs):  # both forwards come first, as in a pipeline
            context = LayerContext(record=record.micro_batch(index))

            def weights(x: Tensor, router: TopKRouter = router, context: LayerContext = context) -> Tensor:
                return router(x, context).weights

            outputs.append(checkpoint(weights, x, use_reentrant=reentrant) if again else weights(x))
        for y in outputs:
            y[:, 0].sum().backward()
        offsets = record.total("quantile_offsets", LAYER)
        results.append(
            {
                "dw": router.weight.grad,
                "dx": [x.grad for x in inputs],
                "loads": record.tokens_per_expert(LAYER),
                "losses": [record.loss(name, LAYER) for name in losses],
                "offsets": torch.zeros(1) if offsets is None else offsets,
            }
        )
    torch.testing.assert_close(results[0], results[1], rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("settings", [{**BALANCE, "jitter": 0.1}, {"selection": "sinkhorn"}, {"selection": "quantile"}])
def test_in_evaluation_routing_is_by_score_alone_and_nothing_is_recorded(settings):
    router, record = router_of(**settings).eval(), StepRecord(1.0)
    context = LayerContext(hidden_dropout_key=keyed(IDS).hidden_dropout_key, record=record.micro_batch(0))
    routing, again = router(x_of(S, B), context), router(x_of(S, B), context)
    plain = router_of().eval()(x_of(S, B), CONTEXT)
    assert torch.equal(routing.indices, plain.indices)
    assert torch.equal(routing.weights, again.weights)
    if settings.get("selection") != "sinkhorn":  # it weighs by softmax over all
        torch.testing.assert_close(routing.weights, plain.weights, rtol=EXACT, atol=EXACT)
    (0.0 * routing.weights).sum().backward()
    assert not router.weight.grad.any()
    assert record.tokens_per_expert(LAYER) is None
    assert record.total("quantile_offsets", LAYER) is None


def test_jitter_is_of_the_token_and_the_step_and_of_the_router_alone():
    router, x = router_of(jitter=0.2, top_k=E), x_of(S, B).requires_grad_()
    before = x.detach().clone()

    def logits(context: LayerContext, rows: slice = slice(None)) -> Tensor:
        return router._logits(x[rows].reshape(-1, H), context)

    whole = logits(keyed(IDS))
    assert torch.equal(x.detach(), before)
    part = slice(3, 7)
    torch.testing.assert_close(logits(keyed(IDS[part]), part), whole.view(S, B, E)[part].reshape(-1, E))
    assert not torch.equal(logits(keyed(IDS, step=1)), whole)
    assert not torch.equal(logits(keyed(IDS + 1000)), whole)
    plain = logits(CONTEXT)
    assert torch.equal(plain, x.view(-1, H) @ router.weight.t())
    # with an identity weight, each logit is a single feature
    with torch.no_grad():
        router.weight.copy_(torch.eye(E, H))
    factors = logits(keyed(IDS)) / x.view(-1, H)[:, :E]
    assert 0.8 <= factors.min() < 0.82
    assert 1.18 < factors.max() <= 1.2
    assert factors.mean().item() == pytest.approx(1.0, abs=0.03)


def test_quantile_offsets_choose_and_leave_the_weights_alone():
    router = router_of(selection="quantile", top_k=1, pre_softmax=True)
    with torch.no_grad():
        router.quantile_offsets[3] = -100.0
    routing = router(x_of(S, B), CONTEXT)
    assert (routing.indices == 3).all()
    logits = x_of(S, B).view(-1, H) @ router.weight.t()
    torch.testing.assert_close(routing.weights[:, 0], logits.softmax(dim=1)[:, 3], rtol=EXACT, atol=EXACT)


def test_sinkhorn_evens_the_loads_of_real_tokens_in_training_alone():
    router, x = router_of(selection="sinkhorn"), x_of(64) + 0.5
    before = router.eval()(x, CONTEXT).tokens_per_expert
    mask = torch.arange(64).view(64, 1) < 48
    routing = router.train()(x, CONTEXT, padding_mask=mask)
    assert before.max() > 1.9 * 64 * K / E
    assert routing.tokens_per_expert.max() < 1.5 * 48 * K / E
    padding = (~mask).flatten()
    assert torch.equal(routing.indices[padding], router.eval()(x, CONTEXT).indices[padding])


def test_in_turn_a_token_goes_where_its_global_number_says():
    router = router_of(selection="round_robin")
    assert router(x_of(S, B), keyed(IDS)).tokens_per_expert.tolist() == [S * B * K // E] * E
    indices = router(x_of(S, B), keyed(IDS)).indices.view(S, B, K)
    assert indices[1, 1].tolist() == [(int(IDS[1, 1]) * K + k) % E for k in range(K)]
    assert router(x_of(S, B), CONTEXT).indices[5].tolist() == [10 % E, 11 % E]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"padding_mask": torch.ones(B, S, dtype=torch.bool)},
            r"padding_mask must be torch.bool \[12, 2\]; got .*\[2, 12\]",
        ),
        ({"padding_mask": torch.ones(S, B)}, r"padding_mask must be torch.bool \[12, 2\]; got torch.float32"),
        (
            {"replayed": torch.zeros(S * B, 3, dtype=torch.int64)},
            r"replayed must be torch.int64 \[24, 2\]; got .*\[24, 3\]",
        ),
    ],
)
def test_masks_and_replayed_experts_of_another_shape_are_refused(given, message):
    with pytest.raises(ShapeError, match=message):
        router_of()(x_of(S, B), CONTEXT, **given)


def test_a_bias_moves_once_a_step_by_the_loads_of_all_micro_batches_and_is_saved_in_float32():
    router = router_of(score_function="sigmoid", expert_bias_update_rate=0.1)
    assert state_tensors(router)["e_score_correction_bias"].dtype == torch.float32
    record = StepRecord(0.25)
    loads = torch.zeros(E, dtype=torch.int64)
    for index in range(4):
        loads += router(x_of(S, B, index), LayerContext(record=record.micro_batch(index))).tokens_per_expert
    assert not router.e_score_correction_bias.any()
    assert torch.equal(record.tokens_per_expert(LAYER), loads)
    router.update_balance_(record.tokens_per_expert(LAYER), None)
    signs = torch.sign(loads.double().mean() - loads)
    torch.testing.assert_close(router.e_score_correction_bias.double(), 0.1 * (signs - signs.mean()))
    assert torch.equal(
        router_of(score_function="sigmoid")(x_of(S), CONTEXT).indices,
        router_of(score_function="sigmoid", expert_bias_update_rate=0.0)(x_of(S), CONTEXT).indices,
    )


def test_offsets_move_by_the_estimates_of_all_micro_batches():
    router, record = router_of(selection="quantile", quantile_decay=0.5), StepRecord(0.5)
    for index in range(2):
        router(x_of(S, B, index), LayerContext(record=record.micro_batch(index)))
    estimates = record.total("quantile_offsets", LAYER)
    assert estimates[-1] == 2.0
    router.update_balance_(record.tokens_per_expert(LAYER), estimates)
    mean = estimates[:-1] / 2
    torch.testing.assert_close(router.quantile_offsets.double(), 0.5 * (mean - mean.mean()))
    assert state_tensors(router).keys() == {"weight", "quantile_offsets"}


@pytest.mark.parametrize("selection", ["top_k", "sinkhorn", "quantile", "round_robin"])
@pytest.mark.parametrize("S", [0, 1])
def test_no_token_and_one_token_are_routed(S, selection):
    losses = BALANCE if selection == "top_k" else {"z_loss": 0.1}
    router = router_of(selection=selection, **losses)
    routing = router(x_of(S), CONTEXT)
    assert routing.indices.shape == routing.weights.shape == (S, K)
    assert int(routing.tokens_per_expert.sum()) == S * K
    routing.weights.sum().backward()
    assert router.weight.grad.isfinite().all()


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_k": 9},
        {"top_k": 1},
        {"router": {"num_groups": 3, "group_topk": 1}},
        {"top_k": 2, "router": {"num_groups": 4, "group_topk": 4}},
        {"top_k": 3, "router": {"num_groups": 4, "group_topk": 2}},
        {"top_k": 4, "router": {"num_groups": 4, "group_topk": 1}},
        {"router": {"num_groups": 2, "group_topk": 1, "group_score_topk": 5}},
        {"router": {"group_score_topk": 1}},
        {"top_k": 8, "router": {"selection": "quantile"}},
        {"router": {"selection": "sinkhorn", "score_function": "sigmoid"}},
        {"router": {"selection": "sinkhorn", "pre_softmax": True}},
        {"router": {"selection": "sinkhorn", "global_balance": 0.1}},
        {"router": {"expert_bias_update_rate": 0.1}},
    ],
    ids=str,
)
def test_settings_that_cannot_be_met_are_refused_at_construction(wrong):
    with pytest.raises(ValidationError):
        config(moe={"num_experts": 8, **wrong})


@pytest.mark.parametrize("path", ["reference", "blocked"])
def test_every_path_routes_alike(path):
    settings = {"score_function": "sigmoid", "num_groups": 4, "group_topk": 2, **BALANCE}

    def result() -> tuple[Routing, Tensor]:
        router = router_of(**settings)
        routing = router(x_of(S, B), CONTEXT)
        routing.weights[:, 0].sum().backward()
        return routing, router.weight.grad

    routing, gradient = result()
    with use(path):
        other, other_gradient = result()
    assert torch.equal(routing.indices, other.indices)
    torch.testing.assert_close(gradient, other_gradient, rtol=EXACT, atol=EXACT)


OPTIONS = {
    "top_k": [1, 2, 3, 8],
    "score_function": ["softmax", "sigmoid", "sqrtsoftplus"],
    "pre_softmax": [False, True],
    "num_groups": [None, None, 2, 4],
    "group_topk": [None, None, 1, 2],
    "group_score_topk": [None, None, None, 1],
    "scaling_factor": [1.0, 2.5],
    "bias": [False, True],
    "selection": ["top_k", "top_k", "top_k", "sinkhorn", "quantile", "round_robin"],
    "expert_bias_update_rate": [None, 0.0, 1e-3],
    "jitter": [0.0, 0.1],
    "sequence_balance": [0.0, 0.0, 0.1],
    "global_balance": [0.0, 0.0, 0.1],
    "z_loss": [0.0, 0.1],
    "capacity": [None, {"factor": 0.5}, {"factor": 1.25, "drop": "position"}],
}


def test_random_settings_route_forward_and_backward_or_are_refused_at_construction():
    random, num_built = Random(0), 0
    for _ in range(1000):  # most of them are contradictory
        settings = {name: random.choice(values) for name, values in OPTIONS.items()}
        plain = {name: values[0] for name, values in OPTIONS.items() if name not in ("top_k", "capacity")}
        given = {name: value for name, value in settings.items() if name not in plain or value != plain[name]}
        try:
            router = router_of(**given)
        except ValidationError:
            continue
        num_built += 1
        mask = torch.arange(S * B).view(S, B) % 5 != 2
        routing = router(x_of(S, B), keyed(IDS), padding_mask=mask)
        (routing.weights * torch.arange(settings["top_k"])).sum().backward()
        assert router.weight.grad.isfinite().all()
        assert int(routing.tokens_per_expert.sum()) == int(mask.sum()) * settings["top_k"]
    assert num_built > 80
