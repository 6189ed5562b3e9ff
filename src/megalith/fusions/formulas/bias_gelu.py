"""Formulas of ``megalith.fusions.fused_bias_gelu``, whose head states them; T tokens, F ffn hidden size."""

from torch import Tensor

from megalith.fusions.formulas.activations import activate, activate_and_back
from megalith.fusions.formulas.rows import wide
from megalith.fusions.paths.blocks import by_blocks
from megalith.fusions.paths.library import Operator, gradients_like

__all__ = ["OPERATOR", "blocked", "gradient_of", "gradients", "outputs", "reference"]


def reference(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """y [..., F], rounded."""
    return activate(_biased(x, bias), activation).to(x.dtype)


def gradient_of(dy: Tensor, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """dx [..., F], not yet rounded."""
    a = _biased(x, bias)
    _, dx = activate_and_back(dy.to(a.dtype), a, activation)
    return dx


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
    by_blocks(lambda x: (activate(_biased(x, bias), activation),), (x,), (y,))
    return y


def _backward(dy: Tensor, x: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    dx, dbias = gradients(dy, x, bias, activation)
    total = dbias.zero_().to(wide(dbias.dtype))

    def formula(dy: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        dx = gradient_of(dy, x, bias, activation)
        return (dx,) if bias is None else (dx, dx.sum(dim=0))

    by_blocks(formula, (dy, x), (dx,), () if bias is None else (total,))
    return dx, total.to(dbias.dtype)


blocked = OPERATOR.register("bias_gelu_blocked", _forward, _backward, opaque=True)
