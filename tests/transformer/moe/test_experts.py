"""experts: rows by loops over them, and rows that belong to no expert."""

import pytest
import torch
from torch import Tensor

from megalith.parallel.parameters import initialize_parameters_
from megalith.transformer.moe.experts import GroupedMLP, SequentialMLP
from tests.transformer.moe.layers import rows_of
from tests.transformer.shapes import config, options

R, E = 9, 4
COUNTS = torch.tensor([3, 0, 2, 0], dtype=torch.int32)  # the last rows belong to no expert
OWNED = 5


def experts_of(kind: type[GroupedMLP]) -> GroupedMLP:
    made = kind(config(moe={"num_experts": E}, mlp_bias=True, activation="swiglu"), options())
    initialize_parameters_(made, 3)
    with torch.no_grad():
        for number, (name, parameter) in enumerate(sorted(made.named_parameters())):
            if name.endswith("bias"):  # zeros would hide the addition of a bias
                parameter.copy_(rows_of(number, *parameter.shape))
    return made


def by_loops(experts: GroupedMLP, rows: Tensor, weights: Tensor) -> Tensor:
    found = []
    for row, weight, e in zip(rows, weights, [0, 0, 0, 2, 2], strict=True):
        gate, up = (experts.gate_up_proj[e, i] @ row + experts.gate_up_proj_bias[e, i] for i in (0, 1))
        inner = torch.nn.functional.silu(gate) * up
        found.append(weight * (experts.down_proj[e] @ inner + experts.down_proj_bias[e]))
    return torch.stack(found)


@pytest.mark.parametrize("kind", [GroupedMLP, SequentialMLP])
def test_rows_are_those_of_loops_and_past_the_last_expert_they_are_zero_whatever_is_in_them(kind):
    experts = experts_of(kind)
    rows, weights = rows_of(1, R, experts.down_proj.shape[1]), rows_of(2, R)
    want = by_loops(experts, rows[:OWNED], weights[:OWNED])
    want.square().sum().backward()
    wanted = {name: parameter.grad.clone() for name, parameter in experts.named_parameters()}
    experts.zero_grad()

    rows[OWNED:], weights[OWNED:] = torch.nan, 0.0
    rows.requires_grad_()
    got = experts(rows, weights, COUNTS)
    got.square().sum().backward()
    torch.testing.assert_close(got, torch.cat([want, torch.zeros_like(got[OWNED:])]), rtol=1e-12, atol=1e-12)
    found = {name: parameter.grad for name, parameter in experts.named_parameters()}
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert not rows.grad[OWNED:].any()
