"""Activations and their gradients in plain torch, by formulas that keep relative accuracy where a result is small.

silu a s(a), with s = sigmoid; gelu_tanh a s(2 u), u = sqrt(2/pi) (a + 0.044715 a^3), as (1 + tanh u) / 2 = s(2 u);
gelu a Phi(a); quick_gelu a s(1.702 a); relu. Hendrycks and Gimpel 2016, "Gaussian Error Linear Units (GELUs)",
arXiv:1606.08415.
"""

import math
from typing import Literal

import torch
from torch import Tensor

__all__ = ["Activation", "activate", "activate_and_back"]

Activation = Literal["silu", "gelu_tanh", "gelu", "quick_gelu", "relu"]

_LINEAR = 2.0 * math.sqrt(2.0 / math.pi)  # 2u = _LINEAR a + _CUBIC a^3
_CUBIC = _LINEAR * 0.044715
_QUICK = 1.702
_ROOT_1_OVER_2_PI = 1.0 / math.sqrt(2.0 * math.pi)


def activate(a: Tensor, activation: str) -> Tensor:
    """The activation of each element, in the dtype of ``a``; differentiable twice."""
    if activation == "silu":
        return torch.nn.functional.silu(a)
    if activation == "relu":
        return torch.relu(a)
    return a * _gate(a, activation)


def activate_and_back(da: Tensor, a: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The activation of each element, and its slope there times ``da``."""
    if activation == "silu":
        return torch.nn.functional.silu(a), _silu_back(da, a)
    if activation == "quick_gelu":  # silu(1.702 a) / 1.702
        scaled = _QUICK * a
        return a * torch.sigmoid(scaled), _silu_back(da, scaled)
    if activation == "relu":
        return torch.relu(a), torch.where(a <= 0.0, 0.0, da)  # NaN keeps its gradient, as in torch
    gate = _gate(a, activation)
    value = a * gate
    if activation == "gelu":
        slope = torch.addcmul(gate, a, torch.exp(-0.5 * a.square()), value=_ROOT_1_OVER_2_PI)
    else:
        slope = torch.addcmul(gate, value * (1.0 - gate), a.square().mul(3.0 * _CUBIC).add(_LINEAR))
    return value, slope * da


def _gate(a: Tensor, activation: str) -> Tensor:
    """What the activation multiplies ``a`` by."""
    if activation == "gelu":
        phi: Tensor = torch.special.ndtr(a)
        return phi
    if activation == "quick_gelu":
        return torch.sigmoid(_QUICK * a)
    return torch.sigmoid(torch.addcmul(_LINEAR * a, a.square(), a, value=_CUBIC))


def _silu_back(da: Tensor, a: Tensor) -> Tensor:
    dx: Tensor = torch.ops.aten.silu_backward(da, a)  # one pass, where the formula takes six
    return dx
