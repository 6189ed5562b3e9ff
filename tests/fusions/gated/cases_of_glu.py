"""Cases of the gated linear units."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.fusions import cost
from megalith.fusions.gated.glu import FUSION, glu
from tests.fusions.harness import Case, Inputs

ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
    "gelu": torch.nn.functional.gelu,
    "quick_gelu": lambda a: a * torch.sigmoid(1.702 * a),
    "relu": torch.relu,
}


def inputs(names: tuple[str, ...], T: int, F: int, dtype: torch.dtype, device: str) -> Inputs:
    made: Inputs = {"x": torch.randn(T, F if "up" in names else 2 * F, device=device).to(dtype)}
    if "up" in names:
        made["up"] = torch.randn(T, F, device=device).to(dtype)
    if "bias" in names:
        made["bias"] = torch.randn(2 * F, device=device).to(dtype)
    if "weights" in names:
        made["weights"] = torch.rand(T, 1, device=device).to(torch.promote_types(dtype, torch.float32))
    return made


def formula(
    x: Tensor,
    up: Tensor | None = None,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
    *,
    activation: str,
    clamp: float | None = None,
    offset: float = 0.0,
    interleaved: bool = False,
) -> Tensor:
    packed = x if up is None else torch.cat((x, up), dim=-1)
    packed = packed if bias is None else packed + bias
    gate, linear = (packed[..., ::2], packed[..., 1::2]) if interleaved else packed.chunk(2, dim=-1)
    if clamp is not None:
        gate, linear = torch.clamp(gate, max=clamp), torch.clamp(linear, min=-clamp, max=clamp)
    y = ACTIVATIONS[activation](gate) * (linear + offset)
    return y if weights is None else y * weights


def terms(x: Tensor, up: Tensor | None = None, **_: Any) -> dict[str, int]:
    return {"dbias": x.shape[0], "dweights": x.shape[1] if up is not None else x.shape[1] // 2}


def case(name: str, *given: str, **settings: Any) -> Case:
    return Case(
        name,
        FUSION,
        partial(inputs, given),
        partial(glu, **settings),
        partial(formula, **settings),
        terms=terms,
        cancels=("0", "dx", "dup"),  # sums with a bias or an offset, and slopes with a zero
        cost=cost.glu,
        shared=("bias", "weights"),
    )


CASES = [
    case("swiglu", activation="silu"),
    case("swiglu, weights", "weights", activation="silu"),
    case("swiglu, clamped, bias and weights", "bias", "weights", activation="silu", clamp=2.0),
    case("swiglu, interleaved, bias", "bias", activation="silu", interleaved=True),
    case("swiglu of two tensors, bias", "up", "bias", activation="silu"),
    case("geglu, bias", "bias", activation="gelu_tanh"),
    case("exact geglu", activation="gelu"),
    case("reglu", activation="relu"),
    case("quick geglu", "bias", "weights", activation="quick_gelu", clamp=2.0, offset=1.0),
]
