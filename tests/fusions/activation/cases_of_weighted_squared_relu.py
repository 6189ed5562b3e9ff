"""Cases of the weighted squared ReLU."""

import torch
from torch import Tensor

from benchmarks.fusions import cost
from megalith.fusions.activation.weighted_squared_relu import FUSION
from megalith.fusions.fused_weighted_squared_relu import weighted_squared_relu_impl
from tests.fusions.harness import Case, Inputs


def inputs(T: int, F: int, dtype: torch.dtype, device: str) -> Inputs:
    w = torch.rand(T, 1, device=device).to(torch.promote_types(dtype, torch.float32))
    return {"input": torch.randn(T, F, device=device).to(dtype), "weights": w}


def formula(input: Tensor, weights: Tensor) -> Tensor:
    return torch.relu(input) ** 2 * weights


CASES = [
    Case(
        "weighted squared relu",
        FUSION,
        inputs,
        weighted_squared_relu_impl,
        formula,
        terms=lambda input, weights: {"dweights": input.shape[1]},
        cost=cost.weighted_squared_relu,
        shared=("weights",),
    )
]
