"""Formulas of ``megalith.fusions.glu``, whose head states them; T tokens, F ffn hidden size, all of them rows."""

import math
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from megalith.errors import ConfigError
from megalith.fusions.formulas.activations import Activation, activate, activate_and_back, clamp_back
from megalith.fusions.formulas.rows import wide
from megalith.fusions.paths.blocks import by_blocks
from megalith.fusions.paths.library import Operator, gradients_like

__all__ = [
    "OPERATOR",
    "Gating",
    "blocked",
    "gradients",
    "gradients_of",
    "join",
    "outputs",
    "reference",
    "split",
    "value_of",
]


class Gating(NamedTuple):
    """What is computed, of ``gate`` and ``up``; the last operands of an operator."""

    activation: str
    offset: float
    clamp: float  # infinite for none
    interleaved: bool

    @classmethod
    def of(cls, activation: str, offset: float, clamp: float | None, interleaved: bool) -> "Gating":
        """From the arguments of ``glu``; raises ConfigError for those that mean nothing."""
        if activation not in get_args(Activation):
            raise ConfigError(f"activation must be one of {', '.join(get_args(Activation))}; got {activation!r}")
        if clamp is not None and not clamp > 0.0:
            raise ConfigError(f"clamp must be positive, or None for no clamp; got {clamp}")
        return cls(activation, float(offset), math.inf if clamp is None else float(clamp), interleaved)


def value_of(x: Tensor, up: Tensor | None, bias: Tensor | None, weights: Tensor | None, gating: Gating) -> Tensor:
    """y [T, F], not yet rounded, of rows ``x`` [T, 2F] or [T, F]; by torch alone, and differentiable twice."""
    a, linear = _biased(x, up, bias, gating.interleaved)
    if gating.clamp != math.inf:
        a, linear = a.clamp(max=gating.clamp), linear.clamp(-gating.clamp, gating.clamp)
    y = activate(a, gating.activation) * (linear + gating.offset if gating.offset else linear)
    return y if weights is None else y * weights.to(y.dtype)


def gradients_of(
    dy: Tensor, x: Tensor, up: Tensor | None, bias: Tensor | None, weights: Tensor | None, gating: Gating
) -> tuple[Tensor, ...]:
    """Gradients of gate and up [T, F], of ``weights`` [T, 1] and of both halves of ``bias``, if given; not rounded."""
    a, linear = _biased(x, up, bias, gating.interleaved)
    dy = dy.to(a.dtype)
    given = a, linear
    clamp = gating.clamp
    if clamp != math.inf:
        a, linear = a.clamp(max=clamp), linear.clamp(-clamp, clamp)
    linear = linear + gating.offset if gating.offset else linear
    act, da = activate_and_back(dy * linear, a, gating.activation)
    dl = act.mul_(dy)
    found: list[Tensor] = []
    if weights is not None:
        found.append((dl * linear).sum(dim=-1, keepdim=True))
        w = weights.to(a.dtype)
        da, dl = da.mul_(w), dl.mul_(w)
    if clamp != math.inf:
        da, dl = clamp_back(da, given[0], -math.inf, clamp), clamp_back(dl, given[1], -clamp, clamp)
    if bias is not None:
        found += [da.sum(dim=0), dl.sum(dim=0)]
    return da, dl, *found


def split(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Gate and up, as views of a packed ``x``."""
    F = x.shape[-1] // 2
    return (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :F], x[..., F:])


def join(gate: Tensor, up: Tensor, interleaved: bool) -> Tensor:
    return torch.stack((gate, up), dim=-1).flatten(-2) if interleaved else torch.cat((gate, up), dim=-1)


def _biased(x: Tensor, up: Tensor | None, bias: Tensor | None, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Gate and up [T, F] in float32 or wider, with their bias."""
    acc = wide(x.dtype)
    if up is None:  # together, in half the operations
        return split(x.to(acc) if bias is None else x.to(acc) + bias.to(acc), interleaved)
    gate, linear = x.to(acc), up.to(acc)
    if bias is None:
        return gate, linear
    gate_bias, up_bias = split(bias.to(acc), interleaved=False)
    return gate + gate_bias, linear + up_bias


def outputs(
    x: Tensor,
    up: Tensor | None,
    bias: Tensor | None,
    weights: Tensor | None,
    activation: str,
    offset: float,
    clamp: float,
    interleaved: bool,
) -> Tensor:
    """Memory for y [T, F]."""
    return x.new_empty(x.shape[0], x.shape[1] if up is not None else x.shape[1] // 2)


def gradients(
    dy: Tensor,
    x: Tensor,
    up: Tensor | None,
    bias: Tensor | None,
    weights: Tensor | None,
    activation: str,
    offset: float,
    clamp: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Memory for dx, dup, dbias and dw, empty for what was not given."""
    dx, dup, dbias, dw = gradients_like(x, up, bias, weights)
    return dx, dup, dbias, dw


OPERATOR = Operator(outputs, gradients, of=("x", "up", "bias", "weights"))


def reference(x: Tensor, up: Tensor | None, bias: Tensor | None, weights: Tensor | None, *options: Any) -> Tensor:
    """y [T, F], rounded."""
    gating = Gating(*options)
    return value_of(x, up, bias, weights, gating).to(x.dtype)


def _forward(x: Tensor, up: Tensor | None, bias: Tensor | None, weights: Tensor | None, *options: Any) -> Tensor:
    y = outputs(x, up, bias, weights, *options)
    gating = Gating(*options)

    def formula(x: Tensor, up: Tensor | None, weights: Tensor | None) -> tuple[Tensor]:
        return (value_of(x, up, bias, weights, gating),)

    by_blocks(formula, (x, up, weights), (y,))
    return y


def _backward(
    dy: Tensor, x: Tensor, up: Tensor | None, bias: Tensor | None, weights: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dx, dup, dbias, dw = gradients_like(x, up, bias, weights)
    gating = Gating(*options)

    def formula(dy: Tensor, x: Tensor, up: Tensor | None, weights: Tensor | None) -> tuple[Tensor, ...]:
        return gradients_of(dy, x, up, bias, weights, gating)

    halves = split(dx, gating.interleaved) if up is None else (dx, dup)
    outputs = halves if weights is None else (*halves, dw)
    total = dbias.zero_().to(wide(dbias.dtype))
    sums = () if bias is None else split(total, gating.interleaved)
    by_blocks(formula, (dy, x, up, weights), outputs, sums)
    return dx, dup, total.to(dbias.dtype), dw


blocked = OPERATOR.register("glu_blocked", _forward, _backward, opaque=True)
