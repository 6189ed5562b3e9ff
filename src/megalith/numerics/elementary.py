"""log, cos and sin that are bitwise reproducible on every processor and device.

Math libraries may differ in the last bit, and torch calls a different one per kind of processor. IEEE 754 fully
specifies sums, products, quotients, roots and conversions, so these functions use nothing else, in float64, one
operation at a time: a fused multiply-add would round differently. They are accurate to about 1e-10, far finer than the
float32 that their results are rounded to.

Source: the series of artanh, cos and sin (Abramowitz and Stegun 1964, 4.6.33, 4.3.66, 4.3.65).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["cos_sin_of_turn", "log"]

_LOG_2 = 0.6931471805599453
_ROOT_HALF = 0.7071067811865476
_ARTANH = [2.0 / (2 * k + 1) for k in range(9)]  # series of 2 artanh(z) / z in powers of z^2
_COS = [(-1.0) ** k / math.factorial(2 * k) for k in range(8)]
_SIN = [(-1.0) ** k / math.factorial(2 * k + 1) for k in range(8)]  # series of sin(x) / x in powers of x^2


def log(x: Tensor) -> Tensor:
    """Returns the natural logarithm of positive, normal ``x``, float64 of any shape."""
    mantissa, exponent = torch.frexp(x)  # in [1/2, 1)
    # log(m / c) = 2 artanh(z) for z = (m - c) / (m + c); c in the middle keeps |z| below 0.172
    z = (mantissa - _ROOT_HALF) / (mantissa + _ROOT_HALF)
    return _polynomial(_ARTANH, z * z).mul_(z).add_((exponent.to(x.dtype) - 0.5).mul_(_LOG_2))


def cos_sin_of_turn(numerator: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Returns cos and sin of 2 pi ``numerator`` / 2^``bits``, float64, for int64 numerators in [0, 2^bits)."""
    half = 1 << (bits - 1)
    x = (numerator - half).to(torch.float64) * (math.pi / (2 * half))  # in [-pi / 2, pi / 2): the angle is 2 x + pi
    square = x * x
    cos, sin = _polynomial(_COS, square), _polynomial(_SIN, square).mul_(x)
    return (sin * sin).mul_(2.0).sub_(1.0), (sin * cos).mul_(-2.0)


def _polynomial(coefficients: Sequence[float], x: Tensor) -> Tensor:
    """Evaluates the polynomial with these coefficients, lowest power first, by Horner's scheme."""
    *lower, highest = coefficients
    value = torch.full_like(x, highest)
    for coefficient in reversed(lower):
        value.mul_(x).add_(coefficient)
    return value
