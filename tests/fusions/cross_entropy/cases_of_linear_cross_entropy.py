"""Cases of fused output projection and cross entropy, on one rank.

In float32: in 16 bits, the logits are rounded before the loss, as by linear, so float64 would differ.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from megalith.fusions.cross_entropy.linear import FUSION
from megalith.fusions.fused_linear_cross_entropy import fused_linear_cross_entropy
from tests.fusions.harness import Case, Inputs

H = 16


def inputs(T: int, V: int, dtype: torch.dtype, device: str, *, bias: bool) -> Inputs:
    return {
        "x": torch.randn(T, H, device=device).to(dtype),
        "weight": torch.randn(V, H, device=device).to(dtype) * 0.5,
        "target": torch.randint(V, (T,), device=device),
        "bias": torch.randn(V, device=device).to(dtype) if bias else None,
    }


def formula(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *, label_smoothing: float = 0.0) -> Tensor:
    return cross_entropy(linear(x, weight, bias), target, reduction="none", label_smoothing=label_smoothing)


def terms(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> dict[str, int]:
    return {"0": H, "dx": H * weight.shape[0], "dweight": H * max(1, x.shape[0]), "dbias": H * max(1, x.shape[0])}


def case(name: str, *, bias: bool = False, **settings: Any) -> Case:
    return Case(
        name,
        FUSION,
        partial(inputs, bias=bias),
        partial(fused_linear_cross_entropy, chunk_size=2, **settings),
        partial(formula, **settings),
        terms=terms,
        dtypes=(torch.float32,),
    )


CASES = [
    case("linear cross entropy"),
    case("linear cross entropy, bias, smoothed", bias=True, label_smoothing=0.1),
]
