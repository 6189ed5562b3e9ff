"""Cases of bias, dropout and residual."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.fusions import cost
from megalith.fusions.core.dispatch import Backend
from megalith.fusions.fused_bias_dropout import bias_dropout_add_fused_train
from megalith.fusions.residual.bias_dropout import FUSION
from megalith.numerics.dropout import DropoutKey, keep_mask
from tests.fusions.harness import Case, Inputs


def inputs(with_bias: bool, residual_dtype: torch.dtype | None, T: int, H: int, dtype: torch.dtype, device: str):
    made: Inputs = {
        "x": torch.randn(T, H, device=device).to(dtype),
        "residual": torch.randn(T, H, device=device).to(torch.promote_types(residual_dtype or dtype, dtype)),
        "tokens": torch.arange(T, device=device) * 3 + 2**33,
    }
    if with_bias:
        made["bias"] = torch.randn(H, device=device).to(dtype)
    return made


def compute(
    x: Tensor,
    residual: Tensor,
    tokens: Tensor,
    bias: Tensor | None = None,
    *,
    p: float,
    feature_offset: int,
    backend: Backend | None,
) -> Tensor:
    key = DropoutKey(seed=5, step=6, tokens=tokens, site=7)
    return bias_dropout_add_fused_train((x, bias), residual, p, key=key, feature_offset=feature_offset, backend=backend)


def formula(
    x: Tensor, residual: Tensor, tokens: Tensor, bias: Tensor | None = None, *, p: float, feature_offset: int
) -> Tensor:
    kept = keep_mask(DropoutKey(5, 6, tokens, 7), p, x.shape[-1], feature_offset)
    return residual + torch.where(kept, x if bias is None else x + bias, 0.0) / (1.0 - p)


def case(
    name: str, p: float, bias: bool = False, residual_dtype: torch.dtype | None = None, feature_offset: int = 0
) -> Case:
    settings: dict[str, Any] = {"p": p, "feature_offset": feature_offset}
    return Case(
        name,
        FUSION,
        partial(inputs, bias, residual_dtype),
        partial(compute, **settings),
        partial(formula, **settings),
        terms=lambda x, **_: {"dbias": x.shape[0]},
        cancels=("0",),
        cost=partial(cost.bias_dropout_add, p=p),
        shared=("bias", "tokens"),
    )


CASES = [
    case("bias dropout add", 0.3, bias=True),
    case("dropout add", 0.3),
    case("bias dropout add to a float32 stream", 0.5, bias=True, residual_dtype=torch.float32),
    case("bias dropout add of a shard of features", 0.1, bias=True, feature_offset=1027),
    case("bias add", 0.0, bias=True),
    case("bias add to a float32 stream", 0.0, bias=True, residual_dtype=torch.float32),
    case("add to a float32 stream", 0.0, residual_dtype=torch.float32),
]
