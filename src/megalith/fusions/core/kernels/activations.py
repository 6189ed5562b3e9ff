"""Activations and their derivatives inside kernels, in float32, from exp alone: libdevice may be missing."""

import math

import triton
import triton.language as tl

from megalith.fusions.core.grids import next_power_of_2

__all__ = [
    "activation",
    "activation_and_slope",
    "exp",
    "log1p",
    "normal_cumulative",
    "relu",
    "sigmoid",
    "tanh_and_slope",
    "tile_of",
]

_WIDEST_TILE = 512
_COLUMNS_OF_WARP = 256  # eight per thread: one load of 16 bytes for 16-bit dtypes

_LOG2_E = tl.constexpr(math.log2(math.e))
_ROOT_2_OVER_PI = tl.constexpr(0.7978845608028654)
_CUBIC = tl.constexpr(0.044715)
_QUICK = tl.constexpr(1.702)
_ROOT_HALF = tl.constexpr(0.7071067811865476)
_ROOT_1_OVER_2_PI = tl.constexpr(0.3989422804014327)


def tile_of(F: int) -> tuple[int, int]:
    """Columns of ``F`` that a program processes at a time, and its number of warps, fewer for narrow rows."""
    block = max(32, min(_WIDEST_TILE, next_power_of_2(F)))
    return block, max(1, block // _COLUMNS_OF_WARP)


@triton.jit
def exp(x):
    """exp(x), by the product that a GPU makes of ``tl.exp`` too; what is below the smallest normal number is 0.

    For subnormal numbers ``tl.exp`` compares and scales every element, twice: 5 instructions, where this takes 2.
    """
    return tl.exp2(x * _LOG2_E)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + exp(-x))


@triton.jit
def log1p(x):
    """log(1 + x): what rounding takes from 1 + x is given back as a factor."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def tanh_and_slope(x):
    """tanh(x) and 1 - tanh(x)^2, from exp alone and with no cancellation on either side."""
    e = tl.exp(-2.0 * tl.abs(x))
    z = x * x
    near = x * (1.0 - z * (1.0 / 3.0 - z * (2.0 / 15.0 - z * (17.0 / 315.0 - z * (62.0 / 2835.0)))))
    far = (1.0 - e) / (1.0 + e)
    tanh = tl.where(z < 0.0625, near, tl.where(x < 0.0, -far, far))
    return tanh, 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def relu(x):
    """x above 0, else 0."""
    # NaN < 0 is false, so NaN passes, as in torch. tl.maximum drops it on a GPU, and not in the interpreter.
    return tl.where(x < 0.0, 0.0, x)


@triton.jit
def normal_cumulative(x):
    """Phi(x), to a relative 2e-7 and the rounding of z^2 in both tails, where 1 + erf would cancel.

    erfc(z) = t exp(-z^2 + polynomial(t)), t = 1 / (1 + z / 2): the Chebyshev fit of Press et al., "Numerical Recipes".
    """
    z = tl.abs(x) * _ROOT_HALF
    t = 1.0 / (1.0 + 0.5 * z)
    p = -0.82215223 + t * 0.17087277
    p = 1.48851587 + t * p
    p = -1.13520398 + t * p
    p = 0.27886807 + t * p
    p = -0.18628806 + t * p
    p = 0.09678418 + t * p
    p = 0.37409196 + t * p
    p = 1.00002368 + t * p
    tail = 0.5 * t * exp(-z * z - 1.26551223 + t * p)
    return tl.where(x < 0.0, tail, 1.0 - tail)


@triton.jit
def activation(x, KIND: tl.constexpr):
    """The activation that ``KIND`` names: silu, quick_gelu, gelu_tanh, gelu or relu."""
    value, _ = activation_and_slope(x, KIND)
    return value


@triton.jit
def activation_and_slope(x, KIND: tl.constexpr):
    """The activation and its derivative at ``x``."""
    if KIND == "silu":
        s = sigmoid(x)
        value = x * s
        slope = s * (1.0 + x * (1.0 - s))
    elif KIND == "quick_gelu":
        s = sigmoid(_QUICK * x)
        value = x * s
        slope = s * (1.0 + _QUICK * x * (1.0 - s))
    elif KIND == "gelu_tanh":
        # 0.5 (1 + tanh u) = sigmoid(2 u)
        s = sigmoid(2.0 * _ROOT_2_OVER_PI * x * (1.0 + _CUBIC * x * x))
        value = x * s
        slope = s + x * s * (1.0 - s) * 2.0 * _ROOT_2_OVER_PI * (1.0 + 3.0 * _CUBIC * x * x)
    elif KIND == "gelu":
        cumulative = normal_cumulative(x)
        value = x * cumulative
        slope = cumulative + x * exp(-0.5 * x * x) * _ROOT_1_OVER_2_PI
    else:
        tl.static_assert(KIND == "relu", "no such activation")
        value = relu(x)
        slope = tl.where(x <= 0.0, 0.0, 1.0)  # 1 for NaN, as in torch
    return value, slope
