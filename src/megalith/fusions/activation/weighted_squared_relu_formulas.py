"""Implements the formulas stated in ``weighted_squared_relu``; T tokens, F ffn hidden size."""

import torch
from torch import Tensor

from megalith.fusions.core.registration import Operator, gradients_like
from megalith.fusions.core.row_wise import Runner, register_row_wise
from megalith.fusions.core.rows import fresh_like, wide

__all__ = [
    "OPERATOR",
    "blocked",
    "compiled",
    "gradients",
    "outputs",
    "weighted_squared_relu",
    "weighted_squared_relu_back",
]


def weighted_squared_relu(x: Tensor, weights: Tensor) -> Tensor:
    """Reference forward: ``x`` [T, F], ``weights`` [T, 1] -> y [T, F] in the dtype of ``x``."""
    acc = wide(x.dtype)
    return (torch.relu(x.to(acc)).square() * weights.to(acc)).to(x.dtype)


def weighted_squared_relu_back(dy: Tensor, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Reference backward: dx [T, F] and dw [T, 1], each in the dtype of its tensor."""
    acc = wide(x.dtype)
    dy, relu = dy.to(acc), torch.relu(x.to(acc))
    dx = 2 * dy * weights.to(acc) * relu
    dw = (dy * relu.square()).sum(dim=-1, keepdim=True)
    return dx.to(x.dtype), dw.to(weights.dtype)


def outputs(x: Tensor, weights: Tensor) -> Tensor:
    """Allocates y [T, F]."""
    return fresh_like(x)


def gradients(dy: Tensor, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Allocates dx and dw."""
    dx, dw = gradients_like(x, weights)
    return dx, dw


OPERATOR = Operator(outputs, gradients, of=("x", "weights"), rows=("x", "weights", "dy"))


def _forward(run: Runner, x: Tensor, weights: Tensor) -> Tensor:
    y = outputs(x, weights)
    run.by_blocks(lambda x, weights: (weighted_squared_relu(x, weights),), (x, weights), (y,))
    return y


def _backward(run: Runner, dy: Tensor, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    dx, dw = gradients(dy, x, weights)
    run.by_blocks(weighted_squared_relu_back, (dy, x, weights), (dx, dw))
    return dx, dw


blocked, compiled = register_row_wise(OPERATOR, "weighted_squared_relu", _forward, _backward)
