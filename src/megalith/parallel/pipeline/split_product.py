"""The matrix product of a split backward: input gradients are computed at once, weight gradients on demand.

    y = x W^T + b       backward_input:  dx = dy W,  db = sum of dy over the rows        backward_weight:  dW = dy^T x

Only weight products are deferred; they are about half of a backward. The gradients of biases, norms and embeddings are
computed in backward_input, which frees everything that the forward saved except the x of each product. backward_weight
needs that x together with dy, so recomputation saves memory only until backward_input.

Qi et al. 2023, "Zero Bubble Pipeline Parallelism", arXiv:2401.10241.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megalith.parallel.linear import MatrixProduct, input_gradient, linear, products_of_backward, weight_gradient

__all__ = ["SplitProduct", "WeightPart"]


class WeightPart(NamedTuple):
    """The operands of a weight gradient, x [..., in] and dy [..., out], its product, and the weight's autograd edge."""

    x: Tensor
    dy: Tensor
    weight: GradientEdge
    product: MatrixProduct

    def backward(self) -> None:
        """Backpropagates dy^T x [out, in] to the parameter, through whatever operations produced the weight from it."""
        torch.autograd.backward((self.weight,), (weight_gradient(self.dy, self.x, self.product),))


class SplitProduct:
    """A ``MatrixProduct`` whose backward defers the weight gradients.

    Pass the same instance to the ``BuildOptions`` of a rank's chunks and to the ``Pipeline`` that runs them. In any
    other backward the weights would get no gradients.
    """

    def __init__(self) -> None:
        self._left: list[WeightPart] = []

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """(x [..., in], weight [out, in], bias [out] or None) -> [..., out]."""
        if not (torch.is_grad_enabled() and x.requires_grad and weight.requires_grad):
            return linear(x, weight, bias)  # there is nothing to split
        y: Tensor = _SplitLinear.apply(x, weight.detach(), bias, get_gradient_edge(weight), self._left)
        return y

    def take(self) -> list[WeightPart]:
        """Returns, and forgets, what the backwards since the last call have deferred."""
        taken = self._left.copy()
        self._left.clear()
        return taken


class _SplitLinear(torch.autograd.Function):
    """The product with a detached ``weight``, so that a backward stops there; ``edge`` leads on to the parameter."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, edge: GradientEdge, left: list[WeightPart]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.edge, ctx.left, ctx.product = edge, left, products_of_backward(x, weight, bias)
        return linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        ctx.left.append(WeightPart(x, dy, ctx.edge, ctx.product))
        db = dy.reshape(-1, dy.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
        return input_gradient(dy, weight, ctx.product), None, db, None, None
