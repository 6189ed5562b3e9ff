"""Activations and their gradients in plain torch; ``activate`` keeps its relative accuracy where the result is small.

silu a s(a), with s = sigmoid; gelu_tanh a s(2 u), u = sqrt(2/pi) (a + 0.044715 a^3), since (1 + tanh u) / 2 = s(2 u);
gelu a Phi(a); quick_gelu a s(1.702 a); relu. Hendrycks and Gimpel 2016, "Gaussian Error Linear Units (GELUs)",
arXiv:1606.08415.
"""

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from megalith.errors import ConfigError

__all__ = ["Activation", "activate", "activation_back", "check_activation"]

Activation = Literal["silu", "gelu_tanh", "gelu", "quick_gelu", "relu"]
_ACTIVATIONS = get_args(Activation)

_LINEAR = 2.0 * math.sqrt(2.0 / math.pi)  # 2u = _LINEAR a + _CUBIC a^3
_CUBIC = _LINEAR * 0.044715
_QUICK = 1.702
_ROOT_HALF = math.sqrt(0.5)
_ROOT_1_OVER_2_PI = 1.0 / math.sqrt(2.0 * math.pi)
# Phi(-x) = exp(-x^2 / 2) t Q(t), t = 1 / (1 + 0.3 x): coefficients of Q in descending powers. Relative error at most
# 3.5e-9 on [0, 14.5], beyond which exp(-x^2 / 2) underflows float32; fitted by reweighted least squares (Lawson)
_TAIL_SCALE = 0.3
_TAIL = (
    -0.020623464566,
    0.112435588724,
    -0.228213542477,
    0.191784458426,
    -0.079423428327,
    0.096156799350,
    0.078389660759,
    0.110235422429,
    0.119571814149,
    0.119686689801,
)

_aten: Any = torch.ops.aten  # torch's own gradients take one pass each; a formula takes several


def check_activation(activation: str) -> None:
    """Raises ConfigError if the activation is unknown."""
    if activation not in _ACTIVATIONS:
        raise ConfigError(f"activation must be one of {', '.join(_ACTIVATIONS)}; got {activation!r}")


def activate(a: Tensor, activation: str, *, recorded: bool = True) -> Tensor:
    """Applies the activation elementwise, in the dtype of ``a``. Raises like ``check_activation``.

    ``recorded``: the result must be differentiable, twice. Without that, exact GELU compiles to a third of the time.
    """
    check_activation(activation)
    if activation == "silu":
        # compiled, both directions of a gated unit share this sigmoid, whose exponential is most of their work
        return a * a.sigmoid() if not recorded and torch.compiler.is_compiling() else torch.nn.functional.silu(a)
    if activation == "relu":
        return torch.relu(a)
    if activation == "gelu":
        return a * (_normal(a)[1] if not recorded and _compiles_to_polynomial(a) else _normal_cumulative(a))
    argument = _QUICK * a if activation == "quick_gelu" else _tanh_argument(a)
    return a * argument.sigmoid_()  # in place: less cache pressure, and autograd only needs the sigmoid


def activation_back(da: Tensor, a: Tensor, activation: str, out: Tensor | None = None) -> Tensor:
    """Returns the derivative at each element times ``da``, in ``out`` if given. Raises like ``check_activation``."""
    check_activation(activation)
    if activation in ("gelu", "gelu_tanh"):  # torch's own gradient loses precision where the slope is near 0
        return torch.mul(_slope_of_gelu(a, activation), da, out=out)
    options: dict[str, Any] = {}
    if activation == "relu":
        operator, options = _aten.threshold_backward, {"threshold": 0.0}
    else:
        operator = _aten.silu_backward
        a = _QUICK * a if activation == "quick_gelu" else a  # quick_gelu is silu(1.702 a) / 1.702
    dx: Tensor = operator(da, a, **options) if out is None else operator.grad_input(da, a, **options, grad_input=out)
    return dx


def _slope_of_gelu(a: Tensor, activation: str) -> Tensor:
    # in place: freshly allocated memory is read before it is written, and displaces other data from the cache
    if activation == "gelu":
        bell, cumulative = _normal(a)
        return bell.mul_(_ROOT_1_OVER_2_PI).mul_(a).add_(cumulative)
    square = a.square()
    s = _tanh_argument(a).sigmoid_()
    slope: Tensor = square.mul_(3.0 * _CUBIC).add_(_LINEAR).mul_(a)  # a (2u)'
    _aten.sigmoid_backward.grad_input(slope, s, grad_input=slope)
    return slope.add_(s)  # s + a (2u)' s (1 - s)


def _normal_cumulative(a: Tensor) -> Tensor:
    return 0.5 * torch.erfc(-_ROOT_HALF * a)


def _normal(a: Tensor) -> tuple[Tensor, Tensor]:
    """exp(-a^2 / 2) and Phi(a), in fresh memory.

    When compiled, one exponential serves both, and Phi is accurate to a relative 3e-7 plus the rounding of a^2; erfc
    would be three times the work there. In eager mode, erfc is cheaper than the polynomial.
    """
    bell = a.square().mul_(-0.5).exp_()
    if not _compiles_to_polynomial(a):
        return bell, _normal_cumulative(a)
    t = a.abs().mul_(_TAIL_SCALE).add_(1.0).reciprocal_()
    tail = t * _TAIL[0]
    for coefficient in _TAIL[1:-1]:
        tail.add_(coefficient).mul_(t)
    tail.add_(_TAIL[-1]).mul_(t).mul_(bell)
    return bell, torch.where(a < 0.0, tail, 1.0 - tail)


def _compiles_to_polynomial(a: Tensor) -> bool:
    return a.dtype != torch.float64 and torch.compiler.is_compiling()


def _tanh_argument(a: Tensor) -> Tensor:
    """2u, in fresh memory."""
    return torch.addcmul(a.new_tensor(_LINEAR), a, a, value=_CUBIC).mul_(a)
