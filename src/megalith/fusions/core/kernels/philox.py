"""The dropout mask of ``megalith.numerics.dropout`` inside kernels, bit for bit.

Triton's own Philox4x32-10 generates the words; this file lays out its counter. One call serves the four features of a
quad, so no word is wasted. Launchers get ``key``, ``token`` and ``site`` from ``core.dropout_mask``.
"""

import triton
import triton.language as tl

__all__ = ["dropout_factor"]


@triton.jit
def dropout_factor(key, token, first_quad, site, THRESHOLD: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    """What dropout multiplies features 4 * ``first_quad`` + [0, ``BLOCK``) of ``token`` with, in float32 [``BLOCK``].

    ``key`` and ``token`` are int64 scalars; ``THRESHOLD`` is ``threshold(p)``, ``SCALE`` 1 / (1 - p), and ``BLOCK`` a
    power of two of at least 4. To multiply, and not to select, passes NaN and inf as torch's dropout does.
    """
    quad = (first_quad + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(key, token.to(tl.uint32), (token >> 32).to(tl.uint32), quad, site)
    word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))  # w0 w1 w2 w3 of each quad interleaved
    return tl.where(word >= THRESHOLD, SCALE, 0.0)
