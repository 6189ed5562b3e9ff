"""Numbers of float8_e4m3fn inside kernels, by integers: sm_80 has no such type, and so every path has the same bits."""

import triton
import triton.language as tl

__all__ = ["decode_e4m3", "encode_e4m3"]

_NAN = tl.constexpr(0x7F)
_SMALLEST_NORMAL = tl.constexpr(0.015625)  # 2^-6; below it numbers are multiples of 2^-9
_MULTIPLES = tl.constexpr(16384.0)  # 2^14, whose last bit in float32 is worth 2^-9
_BITS_OF_MULTIPLES = tl.constexpr(0x46800000)


@triton.jit
def encode_e4m3(x):
    """The byte of the number nearest to ``x``, of two the even one, for abs(x) up to 448; inf and NaN become NaN."""
    size = tl.abs(x)
    bits = size.to(tl.int32, bitcast=True)
    # 20 of 23 bits go; what is added carries into the exponent, whose bias falls from 127 to 7
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = (size + _MULTIPLES).to(tl.int32, bitcast=True) - _BITS_OF_MULTIPLES
    code = tl.where(size < _SMALLEST_NORMAL, small, normal)
    code = tl.where(size < float("inf"), code, _NAN)
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def decode_e4m3(code):
    """The number that the byte ``code`` stands for, in float32."""
    code = code.to(tl.int32)
    size = code & 0x7F
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    x = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)  # of 2^-9
    x = tl.where(size == _NAN, float("nan"), x)
    return tl.where(code >= 0x80, -x, x)
