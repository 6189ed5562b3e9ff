"""Cases of LayerNorm, RMSNorm, and both after bias, dropout and residual."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.fusions import cost
from megalith.fusions.fused_layer_norm import fused_layer_norm, fused_rms_norm
from megalith.fusions.norm.add_norm import FUSION, fused_add_norm
from megalith.fusions.norm.layer_norm import LAYER_NORM_FUSION, RMS_NORM_FUSION
from megalith.numerics.dropout import Dropout, DropoutKey, keep_mask
from tests.fusions.harness import WIDTHS, Case, Inputs

EPS = 1e-3
SHARED = ("weight", "bias", "input_bias")
WIDER_THAN_ONE = tuple(
    width for width in WIDTHS if width > 1
)  # a row of one has a gradient of 0, which has no relative error


def vector(H: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(H, device=device).to(dtype)


def inputs(names: tuple[str, ...], T: int, H: int, dtype: torch.dtype, device: str) -> Inputs:
    wide = torch.promote_types(dtype, torch.float32)
    made: Inputs = {"x": torch.randn(T, H, device=device).to(dtype)}
    return made | {name: vector(H, wide if name == "weight" else dtype, device) for name in names}


def formula(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, kind: str, shift: float) -> Tensor:
    if kind == "LayerNorm":
        x = x - x.mean(dim=-1, keepdim=True)
    y = x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + EPS)
    y = y if weight is None else y * (shift + weight)
    return y if bias is None else y + bias


def terms(x: Tensor, **_: Any) -> dict[str, int]:
    return {"dweight": x.shape[0], "dbias": x.shape[0], "dinput_bias": x.shape[0]}


def norm(name: str, *given: str, **settings: Any) -> Case:
    is_layer_norm = name.startswith("layer")
    return Case(
        name,
        LAYER_NORM_FUSION if is_layer_norm else RMS_NORM_FUSION,
        partial(inputs, given),
        partial(fused_layer_norm if is_layer_norm else fused_rms_norm, eps=EPS, **settings),
        partial(
            formula, kind="LayerNorm" if is_layer_norm else "RMSNorm", shift=float(settings.get("zero_centered", False))
        ),
        terms=terms,
        cancels=("0", "dx"),  # x - mean, and zeros of the gain; in dx, dy minus the row's part
        cost=partial(cost.norm, num_statistics=2 if is_layer_norm else 1),
        shared=SHARED,
        widths=WIDER_THAN_ONE,
    )


def on_a_grid(*shape: int, device: str) -> Tensor:
    """Numbers of which short sums are exact in bfloat16, so that the norm sees the sum as it is stored."""
    return (torch.randn(shape, device=device) * 8).round().clamp(-24, 24) / 8


def inputs_of_sum(names: tuple[str, ...], T: int, H: int, dtype: torch.dtype, device: str) -> Inputs:
    made: Inputs = {name: on_a_grid(T, H, device=device).to(dtype) for name in ("x", "residual")}
    wide = torch.promote_types(dtype, torch.float32)
    if "wide residual" in names:
        made["residual"] = made["residual"].to(wide)
    made["weight"] = vector(H, wide, device)
    if "bias" in names:
        made["bias"] = vector(H, dtype, device)
    if "input_bias" in names:
        made["input_bias"] = on_a_grid(H, device=device).to(dtype)
    if "tokens" in names:
        made["tokens"] = 2**40 + torch.arange(T, device=device) * 7
    return made


def key(tokens: Tensor | None) -> DropoutKey | None:
    return None if tokens is None else DropoutKey(seed=3, step=5, tokens=tokens, site=2)


def compute_sum(
    x: Tensor, residual: Tensor, tokens: Tensor | None = None, p: float = 0.0, **given: Any
) -> tuple[Tensor, Tensor]:
    return fused_add_norm(x, residual, dropout=Dropout(p, key(tokens)) if p else None, eps=EPS, **given)


def formula_of_sum(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    input_bias: Tensor | None = None,
    tokens: Tensor | None = None,
    *,
    normalization: str,
    p: float = 0.0,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor]:
    h = x if input_bias is None else x + input_bias
    h = h if tokens is None else h * keep_mask(key(tokens), p, x.shape[-1]) / (1 - p)
    h = h + residual
    return formula(h, weight, bias, kind=normalization, shift=float(zero_centered)), h


def sum_and_norm(name: str, *given: str, **settings: Any) -> Case:
    return Case(
        name,
        FUSION,
        partial(inputs_of_sum, given),
        partial(compute_sum, **settings),
        partial(formula_of_sum, **settings),
        terms=terms,
        cancels=("0", "1", "dx", "dresidual"),
        cost=partial(cost.add_norm, num_statistics=2 if settings["normalization"] == "LayerNorm" else 1),
        shared=SHARED,
        widths=WIDER_THAN_ONE,
    )


CASES = [
    norm("layer norm", "weight", "bias"),
    norm("rms norm", "weight"),
    norm("rms norm, zero-centred", "weight", zero_centered=True),
    sum_and_norm("add and rms norm", normalization="RMSNorm"),
    sum_and_norm("add and layer norm, float32 residual", "bias", "wide residual", normalization="LayerNorm"),
    sum_and_norm("bias, dropout, add and layer norm", "bias", "input_bias", "tokens", normalization="LayerNorm", p=0.5),
    sum_and_norm(
        "bias, dropout, add and rms norm", "input_bias", "tokens", normalization="RMSNorm", p=0.5, zero_centered=True
    ),
]
