"""Cases of GELU with a bias."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.fusions import cost
from megalith.fusions.activation.bias_gelu import EXACT_16_BIT, FUSION
from megalith.fusions.core.dispatch import Fusion
from megalith.fusions.fused_bias_gelu import bias_gelu_impl
from tests.accuracy import DTYPES
from tests.fusions.harness import Case, Inputs


def inputs(has_bias: bool, T: int, F: int, dtype: torch.dtype, device: str) -> Inputs:
    x = torch.randn(T, F, device=device).to(dtype)
    return {"input": x, "bias": torch.randn(F, device=device).to(dtype) if has_bias else None}


def formula(input: Tensor, bias: Tensor | None, *, approximate: str = "tanh") -> Tensor:
    return torch.nn.functional.gelu(input if bias is None else input + bias, approximate=approximate)


def case(
    name: str, has_bias: bool, fusion: Fusion[Any] = FUSION, dtypes: Sequence[torch.dtype] = DTYPES, **settings: Any
) -> Case:
    return Case(
        name,
        fusion,
        partial(inputs, has_bias),
        partial(bias_gelu_impl, **settings),
        partial(formula, **settings),
        terms=lambda input, bias: {"dbias": input.shape[0]},
        cancels=("0", "dinput"),  # the sum with a bias; a slope that crosses zero
        cost=cost.bias_gelu,
        shared=("bias",),
        dtypes=dtypes,
    )


CASES = [
    case("bias gelu", True),
    case("gelu without a bias", False),
    case("exact bias gelu", True, approximate="none"),
    case("exact gelu in 16 bits", False, EXACT_16_BIT, (torch.float16, torch.bfloat16), approximate="none"),
]
