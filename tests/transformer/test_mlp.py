"""mlp: each activation by its formula, and the same on one process and split over tp."""

import math

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


def built(activation: str, **changes: object) -> MLP:
    layer = MLP(config(activation=activation, add_bias_linear=True), options(**changes))
    initialize_parameters_(layer, seed=1)
    with torch.no_grad():
        for name, parameter, spec in declared_parameters(layer):
            if len(spec.shape) == 1:  # biases begin at zero, and would not show
                parameter.add_(len(name) / 10.0)
    return layer


def x_of() -> Tensor:
    return torch.randn(S, B, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def by_formula(activation: str, x: Tensor, w: dict[str, Tensor]) -> Tensor:
    up = x @ w["up_proj.weight"].t() + w["up_proj.bias"]
    if activation == "swiglu":
        gate = x @ w["gate_proj.weight"].t() + w["gate_proj.bias"]
        hidden = gate / (1.0 + torch.exp(-gate)) * up
    elif activation == "gelu":
        hidden = up * 0.5 * (1.0 + torch.erf(up / math.sqrt(2.0)))
    else:
        hidden = up * 0.5 * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (up + 0.044715 * up**3)))
    return hidden @ w["down_proj.weight"].t() + w["down_proj.bias"]


@pytest.mark.parametrize("activation", ["swiglu", "gelu", "gelu_tanh"])
def test_it_is_the_formula_of_its_activation(activation):
    layer = built(activation)
    weights = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    assert ("gate_proj.weight" in weights) == (activation == "swiglu")
    y = layer(x_of(), LayerContext())
    torch.testing.assert_close(y, by_formula(activation, x_of(), weights), rtol=EXACT, atol=EXACT)


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
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_split_over_tp_it_is_the_same(activation, sequence_parallel):
    want = results(built(activation), x_of(), x_of().sin())
    answers = ranks(2, on_this_rank, activation, sequence_parallel)
    for name, value in want.items():
        parts = [answer[name] for answer in answers]
        for got in [torch.cat(parts)] if sequence_parallel and name in ("y", "dx") else parts:
            torch.testing.assert_close(got, value, rtol=EXACT, atol=EXACT)
