"""moe_layer: outputs and every gradient against loops over tokens and experts, at all sizes; and learning."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.config import DispatchConfig
from megalith.transformer.layer_context import LayerContext
from megalith.transformer.moe.balance import load_metrics
from megalith.transformer.moe.moe_layer import MoELayer
from megalith.transformer.step_record import StepRecord
from tests.transformer.moe.layers import Weights, layer_of, mixture, rows_of, shared, weights_of
from tests.transformer.shapes import options

H, E = 16, 8
EXACT = 1e-11  # float64, sums in another order
LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "swiglu": ({}, {}),
    "geglu, biases": ({"activation": "geglu", "mlp_bias": True}, {}),
    "squared relu, biases": ({"activation": "squared_relu", "mlp_bias": True}, {"top_k": 3}),
    "gelu, sigmoid": ({"activation": "gelu"}, {"router": {"score_function": "sigmoid"}}),
    "shared": ({}, {"shared_ffn_hidden_size": 6}),
    "shared with a gate": ({}, {"shared_ffn_hidden_size": 6, "shared_expert_gate": True}),
    "latents": ({}, {"latent_size": 5, "shared_ffn_hidden_size": 6}),
    "all experts": ({}, {"top_k": E}),
}


def results(layer: MoELayer, x: Tensor) -> dict[str, Tensor]:
    """Output [S, B, H], and the gradients of a loss with a different weight for every element."""
    x = x.clone().requires_grad_()
    y = layer(x, LayerContext())
    (y * slopes(y)).sum().backward()
    return {"y": y.detach(), "dx": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}


def results_by_loops(x: Tensor, weights: Weights, top_k: int, **how: Any) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    y = mixture(x.reshape(-1, H), weights, top_k, **how).view(x.shape)
    (y * slopes(y)).sum().backward()
    return {"y": y.detach(), "dx": x.grad, **{name: _or_zeros(weight) for name, weight in weights.items()}}


def slopes(y: Tensor) -> Tensor:
    return torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)


def randomized_(layer: MoELayer) -> MoELayer:
    """Biases are initially zero, which would hide mistakes."""
    with torch.no_grad():
        for number, (name, parameter) in enumerate(sorted(layer.named_parameters())):
            if name.endswith("bias"):
                parameter.copy_(rows_of(number, *parameter.shape))
    return layer


@pytest.mark.parametrize("name", LAYERS)
def test_output_and_every_gradient_are_those_of_loops_over_tokens_and_experts(name):
    shape, moe = LAYERS[name]
    layer, x = randomized_(layer_of(shape=shape, **{"num_experts": E, **moe})), rows_of(1, 5, 3, H)
    how = {"activation": shape.get("activation", "swiglu"), "sigmoid": "router" in moe}
    if name == "shared with a gate":
        assert (layer.shared_experts.gate(x)).abs().max() > 0.1  # otherwise the gate would be a factor of 1/2
    want = results_by_loops(x, weights_of(layer), moe.get("top_k", 2), **how)
    torch.testing.assert_close(results(layer, x), want, rtol=EXACT, atol=EXACT)


def test_gradients_are_those_of_finite_differences():
    layer, x = layer_of(num_experts=4), rows_of(2, 3, 1, H).requires_grad_()
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def forward(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x, LayerContext()))

    logits = x.detach().view(-1, H) @ layer.gate.weight.detach().t()
    best = logits.sort(descending=True).values
    assert (best[:, 1] - best[:, 2]).min() > 1e-3  # no step of 1e-6 changes a choice
    assert torch.autograd.gradcheck(forward, (x, *parameters), fast_mode=True)


def test_latents_that_are_the_features_change_nothing():
    plain, latent = layer_of(num_experts=E), layer_of(num_experts=E, latent_size=H)
    with torch.no_grad():
        for name, parameter in latent.named_parameters():
            parameter.copy_(torch.eye(H) if "latents" in name else plain.get_parameter(name))
    x = rows_of(3, 4, 2, H)
    torch.testing.assert_close(latent(x, LayerContext()), plain(x, LayerContext()), rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("max_rows", [None, 0.3])
@pytest.mark.parametrize(("S", "experts", "top_k"), [(0, 8, 2), (1, 8, 2), (7, 1, 1), (9, 256, 8), (13, 7, 3)], ids=str)
def test_no_token_one_token_one_expert_and_256_experts_are_computed(S, experts, top_k, max_rows):
    # 5 inner features and 13 tokens fit no tile and no 16-byte alignment
    moe = {"num_experts": experts, "top_k": top_k, "ffn_hidden_size": 5, "router": {"score_function": "sigmoid"}}
    layer = layer_of(options(dispatch=DispatchConfig(max_rows=max_rows)), **moe)
    x = rows_of(4, S, 1, H)
    want = results_by_loops(x, weights_of(layer), top_k, sigmoid=True)
    torch.testing.assert_close(results(layer, x), want, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("max_rows", [None, 0.3])
def test_all_tokens_may_choose_one_expert(max_rows):
    router = {"score_function": "sigmoid", "bias": True}
    layer = layer_of(options(dispatch=DispatchConfig(max_rows=max_rows)), num_experts=E, top_k=1, router=router)
    with torch.no_grad():
        layer.gate.bias[5] = 30.0
    x = rows_of(5, 11, 2, H)
    want = results_by_loops(x, weights_of(layer), 1, sigmoid=True)
    found = results(layer, x)
    torch.testing.assert_close(found, want, rtol=EXACT, atol=EXACT)
    assert [int(gradient.any()) for gradient in found["experts.down_proj"]] == [0, 0, 0, 0, 0, 1, 0, 0]


@pytest.mark.parametrize("pad", [False, True])
def test_a_token_that_every_expert_drops_has_its_shared_expert_alone(pad):
    moe = {"num_experts": E, "top_k": 1, "shared_ffn_hidden_size": 6}
    moe |= {"router": {"score_function": "sigmoid", "bias": True}, "capacity": {"factor": 2.0, "drop": "position"}}
    moe["capacity"]["pad"] = pad
    layer, x = layer_of(**moe), rows_of(6, 12, 1, H)
    with torch.no_grad():
        layer.gate.bias[5] = 30.0
    C = 2 * 12 // E
    weights, rows = weights_of(layer), x.view(-1, H)
    kept, alone = mixture(rows[:C], weights, 1, sigmoid=True), torch.stack([shared(row, weights) for row in rows[C:]])
    y = layer(x, LayerContext()).view(-1, H)
    torch.testing.assert_close(y, torch.cat([kept, alone]), rtol=EXACT, atol=EXACT)


def test_rows_of_a_fixed_number_give_what_rows_as_many_as_chosen_do_and_no_garbage():
    found = []
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # memory that is not written to is NaN
    try:
        for pad in (False, True):
            layer = layer_of(num_experts=E, capacity={"factor": 1.25, "pad": pad})
            found.append(results(layer, rows_of(7, 12, 2, H)))
    finally:
        torch.use_deterministic_algorithms(deterministic)
    torch.testing.assert_close(found[1], found[0], rtol=EXACT, atol=EXACT)
    assert all(tensor.isfinite().all() for tensor in found[1].values())


def test_a_mixture_learns_what_a_dense_layer_of_the_same_operations_cannot_and_its_loads_stay_even():
    # eight random linear maps, chosen for each token by its nearest centre; a dense SwiGLU with the inner width of two
    # experts costs the same operations per token
    centres, maps = 0.9 * rows_of(8, E, H), rows_of(9, E, H, H) / math.sqrt(H)
    shape, sigmoid = {"init_method_std": 0.1}, {"score_function": "sigmoid"}
    balanced = {"micro_batch_balance": 0.01}
    moe = layer_of(shape=shape, num_experts=E, top_k=2, ffn_hidden_size=16, router=balanced)
    dense = layer_of(shape=shape, num_experts=1, top_k=1, ffn_hidden_size=32, router=sigmoid)
    loss, record = learned(moe, centres, maps)
    loss_of_dense, _ = learned(dense, centres, maps)
    assert loss < 0.5 * loss_of_dense
    assert load_metrics(record.tokens_per_expert(0)).max_violation < 0.5


def learned(layer: MoELayer, centres: Tensor, maps: Tensor) -> tuple[float, StepRecord]:
    """The loss and the loads on a held-out batch after 100 steps."""
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, weight_decay=0.0)

    def loss_of(seed: int, context: LayerContext) -> Tensor:
        x = centres[torch.arange(256) % E] + 0.45 * rows_of(seed, 256, H)
        wanted = torch.einsum("tij,tj->ti", maps[torch.arange(256) % E], x)
        return (layer(x.unsqueeze(1), context).squeeze(1) - wanted).square().mean()

    for step in range(100):
        loss_of(step, LayerContext()).backward()
        optimizer.step()
        optimizer.zero_grad()
    record = StepRecord(1.0)
    return loss_of(999, LayerContext(record=record.micro_batch(0))).item(), record


def _or_zeros(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad
