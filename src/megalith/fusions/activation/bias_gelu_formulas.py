"""Implements the formulas stated in ``bias_gelu``; T tokens, F ffn hidden size."""

from torch import Tensor

from megalith.fusions.core.activations import activate, activation_back, check_activation
from megalith.fusions.core.registration import Operator, gradients_like
from megalith.fusions.core.row_wise import Runner, register_row_wise
from megalith.fusions.core.rows import fresh_like, wide

__all__ = ["OPERATOR", "blocked", "compiled", "gradient_of", "gradients", "outputs", "reference", "reference_back"]


def reference(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """y [..., F], rounded."""
    return activate(_biased(x, bias), activation).to(x.dtype)


def gradient_of(dy: Tensor, x: Tensor, bias: Tensor | None, activation: str, out: Tensor | None = None) -> Tensor:
    """dx [..., F] before rounding, in ``out`` if given."""
    a = _biased(x, bias)
    return activation_back(dy.to(a.dtype), a, activation, out)


def reference_back(dy: Tensor, x: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    """dx [T, F] and dbias [F], which is empty without a bias; each in the dtype of its tensor."""
    dx = gradient_of(dy, x, bias, activation)
    dbias = x.new_empty(0) if bias is None else dx.sum(dim=0).to(bias.dtype)
    return dx.to(x.dtype), dbias


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    acc = wide(x.dtype)
    return x.to(acc) if bias is None else x.to(acc) + bias.to(acc)


def outputs(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Allocates y [T, F]."""
    check_activation(activation)
    return fresh_like(x)


def gradients(dy: Tensor, x: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    """Allocates dx [T, F] and dbias [F], which is empty without a bias."""
    dx, dbias = gradients_like(x, bias)
    return dx, dbias


OPERATOR = Operator(outputs, gradients, of=("x", "bias"), rows=("x", "dy"))


def _forward(run: Runner, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    y = outputs(x, bias, activation)

    def formula(x: Tensor, out: list[Tensor | None]) -> tuple[Tensor]:
        return (activate(_biased(x, bias), activation, recorded=False),)

    run.widened_by_blocks(formula, (x,), (y,), acc=wide(x.dtype))
    return y


def _backward(run: Runner, dy: Tensor, x: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    dx, dbias = gradients(dy, x, bias, activation)
    total = dbias.zero_().to(wide(dbias.dtype))

    def formula(dy: Tensor, x: Tensor, out: list[Tensor | None]) -> tuple[Tensor, ...]:
        dx = gradient_of(dy, x, bias, activation, *out)
        return (dx,) if bias is None else (dx, dx)

    run.widened_by_blocks(formula, (dy, x), (dx,), () if bias is None else (total,), acc=wide(x.dtype))
    return dx, total.to(dbias.dtype)


blocked, compiled = register_row_wise(OPERATOR, "bias_gelu", _forward, _backward)
