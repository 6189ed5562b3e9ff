"""mlp: each activation by its formula, and the same on one process and split over tp."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.parallel.parameters import declared_parameters, initialize_parameters_
from megalith.transformer.layer_context import LayerContext
from megalith.transformer.mlp import MLP
from tests.parallel.groups import collection, whole
from tests.rank_pool import ranks
from tests.transformer.shapes import config, options

S, B, H, F = 4, 2, 16, 24
EXACT = 1e-12


# every activation, and gated ones with the options of model.glu
ACTIVATIONS: dict[str, dict[str, Any]] = {
    name: {"activation": name}
    for name in ("swiglu", "geglu", "geglu_tanh", "quick_geglu", "gelu", "gelu_tanh", "relu", "squared_relu")
}
ACTIVATIONS["gpt-oss"] = {"activation": "quick_geglu", "glu": {"clamp": 2.0, "offset": 1.0}}
ACTIVATIONS["clamped swiglu"] = {"activation": "swiglu", "glu": {"clamp": 2.0}}


def built(name: str, **changes: object) -> MLP:
    layer = MLP(config(**ACTIVATIONS[name], add_bias_linear=True), options(**changes))
    initialize_parameters_(layer, seed=1)
    with torch.no_grad():
        for name, parameter, spec in declared_parameters(layer):
            if len(spec.shape) == 1:  # biases start at zero, which would hide mistakes
                parameter.add_(len(name) / 10.0)
    return layer


def x_of() -> Tensor:
    return torch.randn(S, B, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def applied(activation: str, a: Tensor) -> Tensor:
    """Applied to the gate, or to the only projection without a gate."""
    match activation:
        case "swiglu":
            return a / (1.0 + torch.exp(-a))
        case "gelu" | "geglu":
            return a * 0.5 * (1.0 + torch.erf(a / math.sqrt(2.0)))
        case "gelu_tanh" | "geglu_tanh":
            return a * 0.5 * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (a + 0.044715 * a**3)))
        case "quick_geglu":
            return a / (1.0 + torch.exp(-1.702 * a))
    return torch.where(a > 0.0, a, 0.0) ** (2 if activation == "squared_relu" else 1)


def by_formula(name: str, x: Tensor, w: dict[str, Tensor]) -> Tensor:
    settings = ACTIVATIONS[name]
    activation, (clamp, offset) = settings["activation"], (settings.get("glu", {}).get(k) for k in ("clamp", "offset"))
    up = x @ w["up_proj.weight"].t() + w["up_proj.bias"]
    if "glu" not in activation:
        hidden = applied(activation, up)
    else:
        gate = x @ w["gate_proj.weight"].t() + w["gate_proj.bias"]
        if clamp is not None:
            assert (gate > clamp).any(), "the clamp shows"
            assert (up.abs() > clamp).any(), "the clamp shows"
            gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
        hidden = applied(activation, gate) * (up + (offset or 0.0))
    return hidden @ w["down_proj.weight"].t() + w["down_proj.bias"]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_it_is_the_formula_of_its_activation(name):
    layer = built(name)
    weights = {part: parameter.detach().clone().requires_grad_() for part, parameter in layer.named_parameters()}
    assert ("gate_proj.weight" in weights) == ("glu" in ACTIVATIONS[name]["activation"])
    y, want = layer(x_of(), LayerContext()), by_formula(name, x_of(), weights)
    torch.testing.assert_close(y, want, rtol=EXACT, atol=EXACT)
    y.sin().sum().backward()
    want.sin().sum().backward()
    for part, weight in weights.items():
        torch.testing.assert_close(layer.get_parameter(part).grad, weight.grad, rtol=1e-10, atol=1e-10)


def test_its_biases_are_apart_from_those_of_attention():
    for add_bias_linear, mlp_bias in ((True, False), (False, True)):
        layer = MLP(config(add_bias_linear=add_bias_linear, mlp_bias=mlp_bias), options())
        assert any(name.endswith("bias") for name, _ in layer.named_parameters()) == mlp_bias


def test_exact_gelu_in_16_bits_on_a_cpu_equals_torchs_bit_for_bit_with_biases_in_the_products():
    layer = built("gelu").bfloat16()
    x = x_of().bfloat16()
    up, down = layer.up_proj, layer.down_proj
    inner = torch.nn.functional.gelu(torch.nn.functional.linear(x, up.weight, up.bias))
    want = torch.nn.functional.linear(inner, down.weight, down.bias)
    assert torch.equal(layer(x, LayerContext()), want)


def test_squared_relu_of_16_bits_is_rounded_once():
    up = torch.linspace(-3.0, 3.0, 999).to(torch.bfloat16).view(1, 1, -1)
    got = built("squared_relu", dtype=torch.bfloat16)._activate(up, None, None)
    assert torch.equal(got, torch.relu(up.double()).square().to(torch.bfloat16))


def results(layer: MLP, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    y = layer(x.requires_grad_(), LayerContext())
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad} | {name: whole(p.grad) for name, p in layer.named_parameters()}


def on_this_rank(activation: str, sequence_parallel: bool) -> dict[str, Tensor]:
    groups = collection(2)
    layer = built(activation, pg_collection=groups, sequence_parallel=sequence_parallel)
    x, dy = x_of(), x_of().sin()
    if sequence_parallel:
        x, dy = (each.chunk(2)[groups.rank("tp")].clone() for each in (x, dy))
    return results(layer, x, dy)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "gelu", "gpt-oss", "squared_relu"])
def test_split_over_tp_it_is_the_same(activation, sequence_parallel):
    want = results(built(activation), x_of(), x_of().sin())
    answers = ranks(2, on_this_rank, activation, sequence_parallel)
    for name, value in want.items():
        parts = [answer[name] for answer in answers]
        for got in [torch.cat(parts)] if sequence_parallel and name in ("y", "dx") else parts:
            torch.testing.assert_close(got, value, rtol=EXACT, atol=EXACT)
