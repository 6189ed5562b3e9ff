"""Activations and their gradients in plain torch, by formulas that keep relative accuracy where a result is small.

silu a s(a), with s = sigmoid; gelu_tanh a s(2 u), u = sqrt(2/pi) (a + 0.044715 a^3), as (1 + tanh u) / 2 = s(2 u);
gelu a Phi(a); quick_gelu a s(1.702 a); relu. Hendrycks and Gimpel 2016, "Gaussian Error Linear Units (GELUs)",
arXiv:1606.08415.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor

__all__ = ["Activation", "activate", "activate_and_back", "clamp_back"]

Activation = Literal["silu", "gelu_tanh", "gelu", "quick_gelu", "relu"]

_LINEAR = 2.0 * math.sqrt(2.0 / math.pi)  # 2u = _LINEAR a + _CUBIC a^3
_CUBIC = _LINEAR * 0.044715
_QUICK = 1.702
_ROOT_HALF = math.sqrt(0.5)
_ROOT_1_OVER_2_PI = 1.0 / math.sqrt(2.0 * math.pi)

_aten: Any = torch.ops.aten  # gradients of torch's own, of one pass each where a formula has several


def activate(a: Tensor, activation: str) -> Tensor:
    """The activation of each element, in the dtype of ``a``; differentiable twice."""
    if activation == "silu":
        return torch.nn.functional.silu(a)
    if activation == "relu":
        return torch.relu(a)
    if activation == "gelu":
        return a * _normal_cumulative(a)
    argument = _QUICK * a if activation == "quick_gelu" else _tanh_argument(a, a.square())
    return a * argument.sigmoid_()  # in place: fewer tensors crowd the cache, and autograd needs the sigmoid alone


def activate_and_back(da: Tensor, a: Tensor, activation: str, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The activation of each element, and its slope there times ``da``, which may go into ``out``."""
    if activation == "silu":
        act = torch.nn.functional.silu(a)
        return act, _aten.silu_backward(da, a) if out is None else _aten.silu_backward.grad_input(da, a, grad_input=out)
    if activation == "quick_gelu":  # silu(1.702 a) / 1.702
        scaled = _QUICK * a
        back = _aten.silu_backward(da, scaled)
        return scaled.sigmoid_().mul_(a), back
    if activation == "relu":
        return torch.relu(a), _aten.threshold_backward(da, a, 0.0)
    # in place from here on: what is allocated is read from memory before it is written, and crowds the cache
    square = a.square()
    if activation == "gelu":
        cumulative = _normal_cumulative(a)
        density = square.mul_(-0.5).exp_().mul_(_ROOT_1_OVER_2_PI)
        return cumulative * a, torch.mul(density.mul_(a).add_(cumulative), da, out=out)
    s = _tanh_argument(a, square).sigmoid_()
    slope = square.mul_(3.0 * _CUBIC).add_(_LINEAR).mul_(a)  # a (2u)'
    slope = _aten.sigmoid_backward.grad_input(slope, s, grad_input=slope).add_(s)  # s + a (2u)' s (1 - s)
    return s.mul_(a), torch.mul(slope, da, out=out)


def clamp_back(da: Tensor, a: Tensor, low: float, high: float) -> Tensor:
    """``da`` where ``a`` is in [low, high] or NaN, else 0."""
    # torch's leaves the bounds themselves out, so they are moved to the next number
    low, high = torch.nextafter(a.new_tensor([low, high]), a.new_tensor([-math.inf, math.inf])).tolist()
    dx: Tensor = _aten.hardtanh_backward(da, a, low, high)
    return dx


def _normal_cumulative(a: Tensor) -> Tensor:
    return 0.5 * torch.erfc(-_ROOT_HALF * a)


def _tanh_argument(a: Tensor, square: Tensor) -> Tensor:
    """2u, in fresh memory."""
    return (_LINEAR * a).addcmul_(square, a, value=_CUBIC)
