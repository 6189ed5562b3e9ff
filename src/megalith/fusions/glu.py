"""The family of gated linear units: one formula, one operator, many names (fused_bias_swiglu, fused_bias_geglu).

    a, l = gate + bias, up + bias       a <= clamp and -clamp <= l <= clamp, if there is a clamp
    y    = act(a) * (l + offset) * w
    da   = dy * w * act'(a) * (l + offset)    where a <= clamp
    dl   = dy * w * act(a)                    where -clamp <= l <= clamp
    dw   = sum over F of dy * act(a) * (l + offset);   dbias = sum over T of da and dl

Shazeer 2020, "GLU Variants Improve Transformer", arXiv:2002.05202. The activations, with s = sigmoid:
silu a s(a); gelu_tanh a s(2 u), u = sqrt(2/pi) (a + 0.044715 a^3); gelu a Phi(a); quick_gelu a s(1.702 a); relu.

T tokens (leading dimensions flattened), F ffn hidden size. Saved for backward: the input, bias and w; no output.
Floor: forward 3TF elements, backward 5TF, and 4T and 8T bytes for w in float32.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from megalith.errors import ConfigError, ShapeError
from megalith.fusions.backend import Backend, Fusion, compiled
from megalith.fusions.blocks import by_blocks
from megalith.fusions.checks import check_floating, check_one_device, check_shape
from megalith.fusions.library import gradients_like, register
from megalith.fusions.rows import as_rows, wide

__all__ = ["FUSION", "Activation", "Glu", "glu", "glu_back", "glu_forward"]

_TWO_ROOT_2_OVER_PI = 2.0 * math.sqrt(2.0 / math.pi)
Activation = Literal["silu", "gelu_tanh", "gelu", "quick_gelu", "relu"]


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
    _check(x, up, bias, weights, activation, clamp, interleaved)
    shape = (*x.shape[:-1], x.shape[-1] if up is not None else x.shape[-1] // 2)
    w = None if weights is None else weights.reshape(x.shape[:-1].numel(), 1)
    bound = math.inf if clamp is None else clamp
    compute = FUSION.path(x, backend)
    y = compute(as_rows(x), None if up is None else as_rows(up), bias, w, activation, offset, bound, interleaved)
    return y.view(shape)


Glu = Callable[[Tensor, Tensor | None, Tensor | None, Tensor | None, str, float, float, bool], Tensor]


def glu_forward(
    x: Tensor,
    up: Tensor | None,
    bias: Tensor | None,
    weights: Tensor | None,
    activation: str,
    offset: float,
    clamp: float,
    interleaved: bool,
) -> Tensor:
    """Reference forward, of rows: ``x`` [T, 2F] or [T, F], ``weights`` [T, 1] -> y [T, F] in the dtype of ``x``."""
    a, linear = _halves(x, up, bias, interleaved)
    if clamp != math.inf:
        a, linear = a.clamp(max=clamp), linear.clamp(-clamp, clamp)
    y = _activate(a, activation) * (linear + offset if offset else linear)
    return (y if weights is None else y * weights.to(y.dtype)).to(x.dtype)


def glu_back(
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
    """Reference backward, of rows: dx, dup, dbias and dw; dbias in float32 or wider, and empty what does not exist."""
    a, linear = _halves(x, up, bias, interleaved)
    dy = dy.to(a.dtype)
    a_open = linear_open = None
    if clamp != math.inf:
        a_open, linear_open = a <= clamp, linear.abs() <= clamp
        a, linear = a.clamp(max=clamp), linear.clamp(-clamp, clamp)
    act, slope = _activate(a, activation), _slope(a, activation)
    linear = linear + offset if offset else linear
    dw = x.new_empty(0) if weights is None else (dy * act * linear).sum(-1, keepdim=True).to(weights.dtype)
    dy = dy if weights is None else dy * weights.to(dy.dtype)
    da, dl = dy * slope * linear, dy * act
    if a_open is not None and linear_open is not None:
        da, dl = da.where(a_open, 0.0), dl.where(linear_open, 0.0)
    both = torch.stack((da, dl), dim=-1).flatten(-2) if interleaved else torch.cat((da, dl), dim=-1)
    dbias = x.new_empty(0) if bias is None else both.sum(dim=0)
    if up is None:
        return both.to(x.dtype), x.new_empty(0), dbias, dw
    return da.to(x.dtype), dl.to(up.dtype), dbias, dw


def _activate(a: Tensor, activation: str) -> Tensor:
    """The activation, by formulas that keep their relative accuracy where it is small."""
    if activation == "silu":
        return torch.nn.functional.silu(a)
    if activation == "relu":
        return torch.relu(a)
    if activation == "gelu":
        return a * _normal_cumulative(a)
    return a * torch.sigmoid(1.702 * a if activation == "quick_gelu" else _tanh_argument(a))


def _slope(a: Tensor, activation: str) -> Tensor:
    if activation in ("silu", "quick_gelu"):
        scale = 1.0 if activation == "silu" else 1.702
        s = torch.sigmoid(scale * a)
        return s * (1.0 + scale * a * (1.0 - s))
    if activation == "relu":
        return (a > 0).to(a.dtype)
    if activation == "gelu":
        density = torch.exp(-0.5 * a.square()) * (1.0 / math.sqrt(2.0 * math.pi))
        return _normal_cumulative(a) + a * density
    s = torch.sigmoid(_tanh_argument(a))
    return s + a * s * (1.0 - s) * _TWO_ROOT_2_OVER_PI * (1.0 + 3.0 * 0.044715 * a.square())


def _normal_cumulative(a: Tensor) -> Tensor:
    phi: Tensor = torch.special.ndtr(a)
    return phi


def _tanh_argument(a: Tensor) -> Tensor:
    """2u, of which gelu_tanh takes the sigmoid: (1 + tanh u) / 2 = sigmoid(2u)."""
    return _TWO_ROOT_2_OVER_PI * (a + 0.044715 * a**3)


def _halves(x: Tensor, up: Tensor | None, bias: Tensor | None, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Gate and up [T, F] in float32 or wider, with their bias."""
    acc = wide(x.dtype)

    def split(t: Tensor) -> tuple[Tensor, Tensor]:
        if interleaved:
            return t[..., ::2].to(acc), t[..., 1::2].to(acc)
        F = t.shape[-1] // 2
        return t[..., :F].to(acc), t[..., F:].to(acc)

    gate, linear = split(x) if up is None else (x.to(acc), up.to(acc))
    if bias is None:
        return gate, linear
    gate_bias, up_bias = split(bias)
    return gate + gate_bias, linear + up_bias


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
    y = _outputs(x, up)

    def formula(x: Tensor, up: Tensor | None, weights: Tensor | None) -> tuple[Tensor]:
        return (glu_forward(x, up, bias, weights, activation, offset, clamp, interleaved),)

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
    total = dbias.zero_().to(wide(dbias.dtype))

    def formula(dy: Tensor, x: Tensor, up: Tensor | None, weights: Tensor | None) -> tuple[Tensor, ...]:
        dx, dup, dbias, dw = glu_back(dy, x, up, bias, weights, activation, offset, clamp, interleaved)
        return dx, *kept((dup, up), (dw, weights), (dbias, bias))

    def kept(*pairs: tuple[Tensor, Tensor | None]) -> tuple[Tensor, ...]:
        return tuple(gradient for gradient, of in pairs if of is not None)

    outputs = (dx, *kept((dup, up), (dw, weights)))
    by_blocks(formula, (dy, x, up, weights), outputs, () if bias is None else (total,))
    return dx, dup, total.to(dbias.dtype), dw


def _outputs(x: Tensor, up: Tensor | None, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] if up is not None else x.shape[1] // 2)


def _gradients(
    dy: Tensor, x: Tensor, up: Tensor | None, bias: Tensor | None, weights: Tensor | None, *_: Any
) -> tuple[Tensor, ...]:
    return gradients_like(x, up, bias, weights)


_blocked = register(
    "glu_blocked",
    _blocked_forward,
    _outputs,
    _blocked_backward,
    _gradients,
    gradients_of=("x", "up", "bias", "weights"),
    opaque=True,
)


def _triton(*inputs: Any) -> Tensor:
    from megalith.fusions.kernels.glu import op

    return op(*inputs)


_PATHS: Mapping[Backend, Glu] = {
    "triton": _triton,
    "compile": compiled(glu_forward),
    "blocked": _blocked,
    "reference": glu_forward,
}
FUSION = Fusion("glu", _PATHS)


def _check(
    x: Tensor,
    up: Tensor | None,
    bias: Tensor | None,
    weights: Tensor | None,
    activation: str,
    clamp: float | None,
    interleaved: bool,
) -> None:
    if activation not in get_args(Activation):
        raise ConfigError(f"activation must be one of {', '.join(get_args(Activation))}; got {activation!r}")
    if clamp is not None and not clamp > 0.0:
        raise ConfigError(f"clamp must be positive, or None for no clamp; got {clamp}")
    check_floating(x=x, up=up, bias=bias, weights=weights)
    check_one_device(x=x, up=up, bias=bias, weights=weights)
    if x.dim() == 0 or (up is None and x.shape[-1] % 2):
        raise ShapeError(f"x must be [..., 2F], gate and up, or come with up [..., F]; got {list(x.shape)}")
    if up is not None and interleaved:
        raise ConfigError("interleaved is about a packed x; with up given there is nothing to interleave")
    check_shape("up", up, x.shape, "as the gate x")
    check_shape("bias", bias, (x.shape[-1] * (1 if up is None else 2),), "one for each column of gate and up")
    check_shape("weights", weights, (*x.shape[:-1], 1), f"one for each token of x {list(x.shape)}")
