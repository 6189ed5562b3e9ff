"""An independent mixture of experts, as loops over tokens and experts, and layers to compare with it."""

from typing import Any

import torch
from torch import Tensor

from megalith.parallel.build_options import BuildOptions
from megalith.parallel.parameters import initialize_parameters_
from megalith.transformer.moe.moe_layer import MoELayer
from tests.transformer.shapes import config, options

Weights = dict[str, Tensor]


def layer_of(build: BuildOptions | None = None, *, shape: dict[str, Any] | None = None, **moe: Any) -> MoELayer:
    """A float64 layer whose weights, including biases, depend only on the settings."""
    made = MoELayer(config(moe=moe, **shape or {}), build or options(), layer=0)
    initialize_parameters_(made, 5)
    return made


def weights_of(layer: MoELayer) -> Weights:
    """Copies of the weights by name, with gradients enabled."""
    return {name: p.detach().clone().requires_grad_() for name, p in layer.named_parameters()}


def rows_of(seed: int, *shape: int) -> Tensor:
    """Random features in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mixture(x: Tensor, weights: Weights, top_k: int, *, activation: str = "swiglu", sigmoid: bool = False) -> Tensor:
    """[T, H]: the output for tokens [T, H]: shared experts plus every routed expert, in the order of expert numbers."""
    y = []
    for row in x:
        logits = weights["gate.weight"] @ row + weights.get("gate.bias", 0.0)
        chosen = logits.detach().argsort(descending=True)[:top_k].tolist()
        scores = logits[chosen].sigmoid() if sigmoid else logits[chosen].exp()
        scores = scores if sigmoid and top_k == 1 else scores / scores.sum()
        inner = weights["to_latents.weight"] @ row if "to_latents.weight" in weights else row
        found = sum(w * expert(inner, weights, e, activation) for w, e in zip(scores, chosen, strict=True))
        if "from_latents.weight" in weights:
            found = weights["from_latents.weight"] @ found
        y.append(found + shared(row, weights))
    return torch.stack(y) if y else 1.0 * x


def expert(row: Tensor, weights: Weights, e: int, activation: str) -> Tensor:
    """The output of expert ``e`` for one row, without the router's weight."""
    if activation in ("swiglu", "geglu"):
        product = weights["experts.gate_up_proj"][e] @ row + _bias(weights, "experts.gate_up_proj_bias", e)  # [2, F]
        gate, up = product
        h = (torch.nn.functional.silu(gate) if activation == "swiglu" else torch.nn.functional.gelu(gate)) * up
    else:
        h = weights["experts.up_proj"][e] @ row + _bias(weights, "experts.up_proj_bias", e)
        h = {"squared_relu": lambda: h.relu().square(), "gelu": lambda: torch.nn.functional.gelu(h)}[activation]()
    return weights["experts.down_proj"][e] @ h + _bias(weights, "experts.down_proj_bias", e)


def shared(row: Tensor, weights: Weights) -> Tensor:
    """The shared expert, a SwiGLU, with its gate if it has one; zeros without a shared expert."""
    if "shared_experts.up_proj.weight" not in weights:
        return torch.zeros_like(row)
    gate, up = (weights[f"shared_experts.{name}_proj.weight"] @ row for name in ("gate", "up"))
    y = weights["shared_experts.down_proj.weight"] @ (torch.nn.functional.silu(gate) * up)
    gated = weights.get("shared_experts.gate.weight")
    return y if gated is None else (gated @ row).sigmoid() * y


def _bias(weights: Weights, name: str, e: int) -> Tensor | float:
    return weights[name][e] if name in weights else 0.0
