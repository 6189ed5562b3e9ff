"""Implements the formulas stated in ``glu``, on rows; T tokens, F ffn hidden size."""

# ruff: noqa: UP044  a starred annotation would iterate over the NamedTuple class, which raises TypeError

import math
from collections.abc import Sequence
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from megalith.errors import ConfigError
from megalith.fusions.core.activations import activate, activation_back, check_activation
from megalith.fusions.core.registration import Operator, gradients_like
from megalith.fusions.core.row_wise import Runner, register_row_wise
from megalith.fusions.core.rows import wide

__all__ = [
    "OPERATOR",
    "Gating",
    "Operands",
    "blocked",
    "compiled",
    "gradients",
    "gradients_of",
    "halves",
    "join",
    "outputs",
    "reference",
    "reference_back",
    "split",
    "value_of",
]


class Gating(NamedTuple):
    """Options of the gated unit; the last operands of an operator."""

    activation: str
    offset: float
    clamp: float  # infinite for no clamp
    interleaved: bool

    @classmethod
    def of(
        cls, activation: str, offset: float = 0.0, clamp: float | None = None, interleaved: bool = False
    ) -> "Gating":
        """From the arguments of ``glu``; raises ConfigError if they are invalid."""
        check_activation(activation)
        if clamp is not None and not clamp > 0.0:
            raise ConfigError(f"clamp must be positive, or None for no clamp; got {clamp}")
        return cls(activation, float(offset), math.inf if clamp is None else float(clamp), interleaved)


class Operands(NamedTuple):
    """Operands of the operator, for T rows; the last fields are those of ``Gating``."""

    x: Tensor  # [T, F], or [T, 2F] without up
    up: Tensor | None
    bias: Tensor | None  # [2F]
    weights: Tensor | None  # [T, 1]
    activation: str
    offset: float
    clamp: float
    interleaved: bool


def value_of(
    gate: Tensor,
    up: Tensor,
    bias: Tensor | None,
    weights: Tensor | None,
    gating: Gating,
    out: Tensor | None = None,
    *,
    recorded: bool = False,
) -> Tensor:
    """y [T, F] from ``gate`` and ``up`` [T, F] in float32 or wider, using only torch operators.

    ``recorded``: the result must be differentiable, twice. Otherwise the last product may be written to ``out``.
    """
    a, linear = _moved(gate, up, bias, gating)
    if gating.clamp != math.inf:
        a, linear = a.clamp(max=gating.clamp), linear.clamp(-gating.clamp, gating.clamp)
    linear = linear + gating.offset if gating.offset else linear
    act = activate(a, gating.activation, recorded=recorded)
    if weights is None:
        return torch.mul(act, linear, out=out)
    return torch.mul(act * linear, weights.to(act.dtype), out=out)


def gradients_of(
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    bias: Tensor | None,
    weights: Tensor | None,
    gating: Gating,
    out: Sequence[Tensor | None] = (None, None),
) -> tuple[Tensor, ...]:
    """Gradients of gate and up [T, F], and of ``weights`` [T, 1] if given; not rounded.

    The sums of the first two over rows are the gradients of the halves of ``bias``. All are in float32 or wider, like
    ``dy``. The first two are written to ``out`` if given.
    """
    a, linear = given = _moved(gate, up, bias, gating)
    clamp = gating.clamp
    if clamp != math.inf:
        a, linear = a.clamp(max=clamp), linear.clamp(-clamp, clamp)
    linear = linear + gating.offset if gating.offset else linear
    if weights is None and bias is None and clamp == math.inf:
        dl = torch.mul(activate(a, gating.activation, recorded=False), dy, out=out[1])
        return activation_back(dy * linear, a, gating.activation, out[0]), dl
    dl = activate(a, gating.activation, recorded=False).mul_(dy)
    da = activation_back(dy * linear, a, gating.activation)
    dw: list[Tensor] = []
    if weights is not None:
        dw.append((dl * linear).sum(dim=-1, keepdim=True))
        w = weights.to(a.dtype)
        da, dl = da.mul_(w), dl.mul_(w)
    if clamp != math.inf:  # like torch's clamp: the gradient is passed at the bounds and at -inf, but not at NaN
        da, dl = torch.where(given[0] <= clamp, da, 0.0), torch.where(given[1].abs() <= clamp, dl, 0.0)
    return da, dl, *dw


def split(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Gate and up, as views of a packed ``x``."""
    F = x.shape[-1] // 2
    return (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :F], x[..., F:])


def join(gate: Tensor, up: Tensor, interleaved: bool) -> Tensor:
    return torch.stack((gate, up), dim=-1).flatten(-2) if interleaved else torch.cat((gate, up), dim=-1)


def halves(x: Tensor, up: Tensor | None, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Gate and up [T, F], from one packed tensor or from two."""
    return split(x, interleaved) if up is None else (x, up)


def _moved(gate: Tensor, up: Tensor, bias: Tensor | None, gating: Gating) -> tuple[Tensor, Tensor]:
    if bias is None:
        return gate, up
    gate_bias, up_bias = split(bias.to(gate.dtype), gating.interleaved)
    return gate + gate_bias, up + up_bias


def outputs(
    x: Tensor,
    up: Tensor | None,
    bias: Tensor | None,
    weights: Tensor | None,
    *options: Unpack[Gating],
) -> Tensor:
    """Allocates y [T, F]."""
    check_activation(Gating(*options).activation)
    return x.new_empty(x.shape[0], x.shape[1] if up is not None else x.shape[1] // 2)


def gradients(
    dy: Tensor,
    x: Tensor,
    up: Tensor | None,
    bias: Tensor | None,
    weights: Tensor | None,
    *options: Unpack[Gating],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocates dx, dup, dbias and dw, empty for operands that are None."""
    dx, dup, dbias, dw = gradients_like(x, up, bias, weights)
    return dx, dup, dbias, dw


OPERATOR = Operator(outputs, gradients, of=("x", "up", "bias", "weights"), rows=("x", "up", "weights", "dy"))


def reference(
    x: Tensor, up: Tensor | None, bias: Tensor | None, weights: Tensor | None, *options: Unpack[Gating]
) -> Tensor:
    """y [T, F], rounded."""
    gating = Gating(*options)
    gate, linear = (half.to(wide(x.dtype)) for half in halves(x, up, gating.interleaved))
    return value_of(gate, linear, bias, weights, gating, recorded=True).to(x.dtype)


def reference_back(
    dy: Tensor, x: Tensor, up: Tensor | None, bias: Tensor | None, weights: Tensor | None, *options: Unpack[Gating]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx, dup, dbias and dw, each in the dtype of its tensor, and empty for operands that are None."""
    gating, acc, nothing = Gating(*options), wide(x.dtype), x.new_empty(0)
    gate, linear = halves(x, up, gating.interleaved)
    da, dl, *of_weights = gradients_of(dy.to(acc), gate.to(acc), linear.to(acc), bias, weights, gating)
    # rounded before they are joined: otherwise the compiler joins them in float32, in memory
    dx, dup = da.to(x.dtype), dl.to(x.dtype if up is None else up.dtype)
    dw = nothing if weights is None else of_weights[0].to(weights.dtype)
    dbias = nothing if bias is None else join(da.sum(dim=0), dl.sum(dim=0), gating.interleaved).to(bias.dtype)
    if up is None:
        return join(dx, dup, gating.interleaved), nothing, dbias, dw
    return dx, dup, dbias, dw


def _forward(
    run: Runner, x: Tensor, up: Tensor | None, bias: Tensor | None, weights: Tensor | None, *options: Unpack[Gating]
) -> Tensor:
    y, gating = outputs(x, up, bias, weights, *options), Gating(*options)

    def formula(gate: Tensor, up: Tensor, weights: Tensor | None, out: list[Tensor | None]) -> tuple[Tensor]:
        return (value_of(gate, up, bias, weights, gating, *out),)

    run.widened_by_blocks(formula, (*halves(x, up, gating.interleaved), weights), (y,), acc=wide(x.dtype))
    return y


def _backward(
    run: Runner,
    dy: Tensor,
    x: Tensor,
    up: Tensor | None,
    bias: Tensor | None,
    weights: Tensor | None,
    *options: Unpack[Gating],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dx, dup, dbias, dw = gradients_like(x, up, bias, weights)
    gating = Gating(*options)

    def formula(
        dy: Tensor, gate: Tensor, up: Tensor, weights: Tensor | None, out: list[Tensor | None]
    ) -> tuple[Tensor, ...]:
        found = gradients_of(dy, gate, up, bias, weights, gating, out)
        return found if bias is None else (*found, *found[:2])

    given = *halves(x, up, gating.interleaved), weights
    outputs = [*halves(dx, None if up is None else dup, gating.interleaved), *([] if weights is None else [dw])]
    total = dbias.zero_().to(wide(dbias.dtype))
    sums = () if bias is None else split(total, gating.interleaved)
    run.widened_by_blocks(formula, (dy, *given), outputs, sums, acc=wide(x.dtype))
    return dx, dup, total.to(dbias.dtype), dw


blocked, compiled = register_row_wise(OPERATOR, "glu", _forward, _backward)
