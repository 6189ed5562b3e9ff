"""The family of gated linear units: one formula, one operator, many names (fused_bias_swiglu, fused_bias_geglu).

    a, l = gate + bias, up + bias       a <= clamp and -clamp <= l <= clamp, if there is a clamp
    y    = act(a) * (l + offset) * w
    da   = dy * w * act'(a) * (l + offset)    where a <= clamp
    dl   = dy * w * act(a)                    where -clamp <= l <= clamp
    dw   = sum over F of dy * act(a) * (l + offset);   dbias = sum over T of da and dl

Shazeer 2020, "GLU Variants Improve Transformer", arXiv:2002.05202. Activations: ``megalith.fusions.activations``.

T tokens (leading dimensions flattened), F ffn hidden size. Saved for backward: the input, bias and w; no output.
Floor: forward 3TF elements, backward 5TF, and 4T and 8T bytes for w in float32.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from megalith.errors import ConfigError, ShapeError
from megalith.fusions.activations import Activation, activate, activate_and_back, clamp_back
from megalith.fusions.backend import Backend, Fusion, compiled
from megalith.fusions.blocks import by_blocks
from megalith.fusions.checks import check_floating, check_one_device, check_shape
from megalith.fusions.library import gradients_like, register
from megalith.fusions.rows import as_rows, in_shape, wide

__all__ = [
    "FUSION",
    "Gating",
    "check",
    "glu",
    "glu_back",
    "gradients",
    "gradients_of",
    "outputs",
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


def glu(
    x: Tensor,
    up: Tensor | None = None,
    *,
    activation: Activation,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
    offset: float = 0.0,
    clamp: float | None = None,
    interleaved: bool = False,
    backend: Backend | None = None,
) -> Tensor:
    """``act(gate) * (up + offset) * weights``, of one packed tensor or of two.

    Args:
        x: the gate [..., F]; or, without ``up``, gate and up [..., 2F], one half after the other.
        up: [..., F], where gate and up come from two projections.
        activation: of the gate; part of what is computed, never of how.
        bias: [2F], in the order of a packed ``x``.
        weights: [..., 1], one for each token, often float32 while ``x`` is bfloat16: the router's probability.
        offset: added to up, after its clamp (1 in gpt-oss); has no gradient.
        clamp: the gate's upper bound and up's bounds on both sides, after the bias (7 in gpt-oss).
        interleaved: a packed ``x`` holds gate and up by turns, as Hugging Face's gpt-oss does.
        backend: the path to take; by default that of ``use(...)``, else the one of the table.

    Returns:
        [..., F] in the dtype of ``x``.

    Raises:
        ShapeError: the tensors do not fit together.
        ConfigError: an unknown activation, or a clamp that is not positive.
        BackendError: ``backend`` cannot run on ``x``.
    """
    gating = Gating.of(activation, offset, clamp, interleaved)
    check(x, up, bias, weights, interleaved)
    compute = FUSION.path(x, backend)
    y = compute(as_rows(x), _rows(up), bias, _rows(weights), *gating)
    return in_shape(y, (*x.shape[:-1], y.shape[-1]))


@torch.no_grad()
def glu_back(
    dy: Tensor,
    x: Tensor,
    up: Tensor | None = None,
    *,
    activation: Activation,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
    offset: float = 0.0,
    clamp: float | None = None,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Reference backward of ``glu``: dx, dup, dbias and dw, each as what it is the gradient of, or None without it.

    They are numbers: nothing is differentiated through them.
    """
    gating = Gating.of(activation, offset, clamp, interleaved)
    check(x, up, bias, weights, interleaved)
    check_shape("dy", dy, (*x.shape[:-1], x.shape[-1] // (2 if up is None else 1)), "as the output")
    da, dl, *rest = gradients_of(as_rows(dy), as_rows(x), _rows(up), bias, _rows(weights), gating)
    dw = None if weights is None else rest.pop(0).to(weights.dtype).view(weights.shape)
    dbias = None if bias is None else _join(rest[0], rest[1], interleaved).to(bias.dtype)
    if up is None:
        return _join(da, dl, interleaved).to(x.dtype).view(x.shape), None, dbias, dw
    return da.to(x.dtype).view(x.shape), dl.to(up.dtype).view(up.shape), dbias, dw


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


def _join(gate: Tensor, up: Tensor, interleaved: bool) -> Tensor:
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


def _rows(x: Tensor | None) -> Tensor | None:
    return None if x is None else as_rows(x)


def _reference(
    x: Tensor,
    up: Tensor | None,
    bias: Tensor | None,
    weights: Tensor | None,
    activation: str,
    offset: float,
    clamp: float,
    interleaved: bool,
) -> Tensor:
    gating = Gating(activation, offset, clamp, interleaved)
    return value_of(x, up, bias, weights, gating).to(x.dtype)


def _blocked_forward(
    x: Tensor,
    up: Tensor | None,
    bias: Tensor | None,
    weights: Tensor | None,
    activation: str,
    offset: float,
    clamp: float,
    interleaved: bool,
) -> Tensor:
    y = outputs(x, up)
    gating = Gating(activation, offset, clamp, interleaved)

    def formula(x: Tensor, up: Tensor | None, weights: Tensor | None) -> tuple[Tensor]:
        return (value_of(x, up, bias, weights, gating),)

    by_blocks(formula, (x, up, weights), (y,))
    return y


def _blocked_backward(
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
    dx, dup, dbias, dw = gradients_like(x, up, bias, weights)
    gating = Gating(activation, offset, clamp, interleaved)

    def formula(dy: Tensor, x: Tensor, up: Tensor | None, weights: Tensor | None) -> tuple[Tensor, ...]:
        return gradients_of(dy, x, up, bias, weights, gating)

    halves = split(dx, interleaved) if up is None else (dx, dup)
    outputs = halves if weights is None else (*halves, dw)
    total = dbias.zero_().to(wide(dbias.dtype))
    sums = () if bias is None else split(total, interleaved)
    by_blocks(formula, (dy, x, up, weights), outputs, sums)
    return dx, dup, total.to(dbias.dtype), dw


Glu = Callable[[Tensor, Tensor | None, Tensor | None, Tensor | None, str, float, float, bool], Tensor]


def outputs(x: Tensor, up: Tensor | None, *_: Any) -> Tensor:
    """Memory for y [T, F]."""
    return x.new_empty(x.shape[0], x.shape[1] if up is not None else x.shape[1] // 2)


def gradients(
    dy: Tensor, x: Tensor, up: Tensor | None, bias: Tensor | None, weights: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Memory for dx, dup, dbias and dw, empty for what was not given."""
    dx, dup, dbias, dw = gradients_like(x, up, bias, weights)
    return dx, dup, dbias, dw


_blocked = register(
    "glu_blocked",
    _blocked_forward,
    outputs,
    _blocked_backward,
    gradients,
    gradients_of=("x", "up", "bias", "weights"),
    opaque=True,
)


def _triton(*inputs: Any) -> Tensor:
    from megalith.fusions.kernels.glu import op

    return op(*inputs)


_PATHS: Mapping[Backend, Glu] = {
    "triton": _triton,
    "compile": compiled(_reference),
    "blocked": _blocked,
    "reference": _reference,
}
FUSION = Fusion("glu", _PATHS)


def check(x: Tensor, up: Tensor | None, bias: Tensor | None, weights: Tensor | None, interleaved: bool) -> None:
    """Raises ShapeError, or ConfigError for an order without a packed ``x``, unless the operands fit together."""
    check_floating(x=x, up=up, bias=bias, weights=weights)
    check_one_device(x=x, up=up, bias=bias, weights=weights)
    if x.dim() == 0 or (up is None and x.shape[-1] % 2):
        raise ShapeError(f"x must be [..., 2F], gate and up, or come with up [..., F]; got {list(x.shape)}")
    if up is not None and interleaved:
        raise ConfigError("interleaved is about a packed x; with up given there is nothing to interleave")
    check_shape("up", up, x.shape, "as the gate x")
    check_shape("bias", bias, (x.shape[-1] * (1 if up is None else 2),), "one for each column of gate and up")
    check_shape("weights", weights, (*x.shape[:-1], 1), f"one for each token of x {list(x.shape)}")
