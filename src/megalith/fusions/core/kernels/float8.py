"""8-bit and 4-bit floating-point numbers inside kernels, with the same bits on every path.

In integer arithmetic, because sm_80 and the interpreter have no such types; or, if ``casts_natively``, with the GPU's
own conversions. Those give every NaN the same sign, as a product on a GPU does, so there only products may be encoded.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalith.optional import triton_interprets

__all__ = ["INFINITY", "MAGNITUDE", "NAN", "casts_natively", "decode_e4m3", "encode", "encode_e4m3"]

# bits of float32
INFINITY = tl.constexpr(0x7F800000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
NAN = tl.constexpr(0x7F)  # in both 8-bit formats


def casts_natively(x: Tensor) -> bool:
    """Whether kernels for ``x`` convert 8-bit numbers with the GPU's own instructions: from sm_90 on.

    sm_89 has them too, but there Triton 3.6 rounds to float16 first, so that 0.4 % of the e4m3 codes differ.
    """
    if triton_interprets() or not x.is_cuda or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(x.device) >= (9, 0)


@triton.jit
def encode(y, FORMAT: tl.constexpr, NATIVE: tl.constexpr, INFINITY_IS_NAN: tl.constexpr = False):
    """The code nearest to ``y``, of two the even one; that of the largest number for what is beyond it.

    ``FORMAT`` is "e4m3", "e5m2", or "e2m1", which has no NaN.
    """
    if NATIVE and FORMAT != "e2m1":
        code = _encode_natively(y, FORMAT, INFINITY_IS_NAN)
    else:
        code = _encode_by_integers(y, FORMAT, INFINITY_IS_NAN)
    return code


@triton.jit
def _encode_natively(y, FORMAT: tl.constexpr, INFINITY_IS_NAN: tl.constexpr):
    if INFINITY_IS_NAN:
        y = tl.where(tl.abs(y) == float("inf"), float("nan"), y)
    code = y.to(tl.float8e4nv) if FORMAT == "e4m3" else y.to(tl.float8e5)
    return code.to(tl.uint8, bitcast=True)


@triton.jit
def _encode_by_integers(y, FORMAT: tl.constexpr, INFINITY_IS_NAN: tl.constexpr):
    MANTISSA: tl.constexpr = 3 if FORMAT == "e4m3" else 2 if FORMAT == "e5m2" else 1
    TOP: tl.constexpr = 0x7E if FORMAT == "e4m3" else 0x7B if FORMAT == "e5m2" else 0x7
    SIGN: tl.constexpr = 3 if FORMAT == "e2m1" else 7  # its bit
    # of the smallest normal number, as float32 holds it: 127 more than it is
    EXPONENT: tl.constexpr = 127 - 6 if FORMAT == "e4m3" else 127 - 14 if FORMAT == "e5m2" else 127
    CUT: tl.constexpr = 23 - MANTISSA
    bits = y.to(tl.int32, bitcast=True)
    magnitude = bits & MAGNITUDE
    # half a step less a bit, and that bit where the last one kept is odd; exponents begin at 1 with the smallest normal
    normal = (magnitude + ((1 << (CUT - 1)) - 1 - ((EXPONENT - 1) << 23)) + ((magnitude >> CUT) & 1)) >> CUT
    # subnormal numbers count a step; added to a float32 whose last bit is that step, y is rounded to a multiple of it
    STEP: tl.constexpr = (EXPONENT + CUT) << 23
    step = tl.full(y.shape, STEP, tl.int32).to(tl.float32, bitcast=True)
    subnormal = (magnitude.to(tl.float32, bitcast=True) + step).to(tl.int32, bitcast=True) - STEP
    code = tl.minimum(tl.where(magnitude < (EXPONENT << 23), subnormal, normal), TOP)
    if FORMAT != "e2m1":
        LAST: tl.constexpr = INFINITY - 1 if INFINITY_IS_NAN else INFINITY
        code = tl.where(magnitude > LAST, NAN, code)
    return code | ((bits >> (31 - SIGN)) & (1 << SIGN))


@triton.jit
def encode_e4m3(y, NATIVE: tl.constexpr):
    """The byte of e4m3 nearest to ``y``; inf and NaN become NaN."""
    return encode(y, "e4m3", NATIVE, INFINITY_IS_NAN=True).to(tl.uint8)


@triton.jit
def decode_e4m3(code, NATIVE: tl.constexpr):
    """The number that the byte ``code`` stands for, in float32."""
    return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32) if NATIVE else _decode_by_integers(code)


@triton.jit
def _decode_by_integers(code):
    code = code.to(tl.int32)
    size = code & 0x7F
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    x = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)  # of 2^-9
    x = tl.where(size == NAN, float("nan"), x)
    return tl.where(code >= 0x80, -x, x)
