"""Cases of gated linear units that save their input in 8 bits: values at x, gradients at the rounded x."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.fusions import cost
from megalith.fusions.gated.glu_float8 import FUSION, glu_float8
from tests.fusions.gated import cases_of_glu as glu
from tests.fusions.harness import Case


def rounded(x: Tensor) -> Tensor:
    """``x`` [T, N] rounded to float8, in float64, scaled so that each row's largest number is 448."""
    numbers = x.detach().float()
    scale = (numbers.abs().amax(dim=-1, keepdim=True) * (1.0 / 448.0)).clamp_min(2.0**-126)
    return ((numbers * (1.0 / scale)).to(torch.float8_e4m3fn).float() * scale).double()


def formula(x: Tensor, bias: Tensor | None = None, weights: Tensor | None = None, **settings: Any) -> Tensor:
    near = x + (rounded(x) - x).detach()
    y = glu.formula(near, None, bias, weights, **settings)
    return y + (glu.formula(x, None, bias, weights, **settings) - y).detach()


def case(name: str, *given: str, **settings: Any) -> Case:
    return Case(
        name,
        FUSION,
        partial(glu.inputs, given),
        partial(glu_float8, **settings),
        partial(formula, **settings),
        terms=glu.terms,
        cancels=("0", "dx"),
        cost=cost.glu_float8,
        shared=("bias", "weights"),
        derivative=False,
    )


# no clamp that low-precision sums can hit: float32 would round onto it, float64 next to it, where the slope differs
CASES = [
    case("swiglu, float8", activation="silu"),
    case("swiglu, float8, all options", "bias", "weights", activation="silu", clamp=1.9, interleaved=True),
]
