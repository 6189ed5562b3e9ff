"""Formulas of ``megalith.fusions.fused_bias_gelu``, whose head states them; T tokens, F ffn hidden size."""

from torch import Tensor

from megalith.fusions.formulas.activations import activate, activation_back
from megalith.fusions.formulas.rows import wide
from megalith.fusions.paths.blocks import widened_by_blocks
from megalith.fusions.paths.library import Operator, gradients_like

__all__ = ["OPERATOR", "blocked", "gradient_of", "gradients", "outputs", "reference"]


def reference(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """y [..., F], rounded."""
    return activate(_biased(x, bias), activation).to(x.dtype)


def gradient_of(dy: Tensor, x: Tensor, bias: Tensor | None, activation: str, out: Tensor | None = None) -> Tensor:
    """dx [..., F], not yet rounded; it may go into ``out``."""
    a = _biased(x, bias)
    return activation_back(dy.to(a.dtype), a, activation, out)


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    acc = wide(x.dtype)
    return x.to(acc) if bias is None else x.to(acc) + bias.to(acc)


def outputs(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Memory for y [T, F]."""
    return x.new_empty(x.shape)


def gradients(dy: Tensor, x: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    """Memory for dx [T, F] and dbias [F], which is empty without a bias."""
    dx, dbias = gradients_like(x, bias)
    return dx, dbias


OPERATOR = Operator(outputs, gradients, of=("x", "bias"))


def _forward(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    y = outputs(x, bias, activation)

    def formula(x: Tensor, out: list[Tensor | None]) -> tuple[Tensor]:
        return (activate(_biased(x, bias), activation),)

    widened_by_blocks(formula, (x,), (y,), acc=wide(x.dtype))
    return y


def _backward(dy: Tensor, x: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    dx, dbias = gradients(dy, x, bias, activation)
    total = dbias.zero_().to(wide(dbias.dtype))

    def formula(dy: Tensor, x: Tensor, out: list[Tensor | None]) -> tuple[Tensor, ...]:
        dx = gradient_of(dy, x, bias, activation, *out)
        return (dx,) if bias is None else (dx, dx.sum(dim=0))

    widened_by_blocks(formula, (dy, x), (dx,), () if bias is None else (total,), acc=wide(x.dtype))
    return dx, total.to(dbias.dtype)


blocked = OPERATOR.register("bias_gelu_blocked", _forward, _backward, opaque=True)
