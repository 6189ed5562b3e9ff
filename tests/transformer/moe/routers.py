"""Routers of small models, and their inputs."""

from typing import Any

import torch
from torch import Tensor

from megalith.numerics.dropout import DropoutKey
from megalith.parallel.parameters import initialize_parameters_
from megalith.transformer.dropout import name_dropout_sites_
from megalith.transformer.layer_context import LayerContext
from megalith.transformer.moe.router import TopKRouter
from tests.transformer.shapes import config, options

H = 16
LAYER = 3


def router_of(
    *,
    experts: int = 8,
    top_k: int = 2,
    capacity: dict[str, Any] | None = None,
    build: dict[str, Any] | None = None,
    **router: Any,
) -> TopKRouter:
    """A float64 router whose weights depend only on the settings."""
    moe = {"num_experts": experts, "top_k": top_k, "router": router, "capacity": capacity}
    built = TopKRouter(config(moe=moe), options(**build or {}), LAYER)
    name_dropout_sites_(built)
    initialize_parameters_(built, seed=7)
    return built


def x_of(S: int, B: int = 1, seed: int = 0) -> Tensor:
    """[S, B, H]"""
    return torch.randn(S, B, H, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def keyed(tokens: Tensor, step: int = 0) -> LayerContext:
    """The context of tokens with these global ids, [S, B]."""
    return LayerContext(hidden_dropout_key=DropoutKey(5, step, tokens))
