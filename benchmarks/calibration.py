"""The machine's current speed: matrix products and copies of random data, at the size of a training step."""

import functools
import statistics
import time
from collections.abc import Callable

import torch

__all__ = ["RATES", "Calibration"]

# name -> unit
RATES = {"float32": "GEMM float32, TFLOP/s", "bfloat16": "GEMM bfloat16, TFLOP/s", "copy": "copy, GB/s read + written"}
_N = 2048  # a 2048^3 product, near the peak rate of this kind of machine
_SMALLEST = 256
_LONGEST = 0.5  # seconds per product; a processor without bfloat16 takes 17 s for 2048^3
_COPY = 64 << 20  # float32 elements, 256 MiB: more than any cache
_REPEATS = 5


class Calibration:
    """Keeps its buffers, so that no measurement includes the cost of fresh memory."""

    def __init__(self) -> None:
        self._products = []
        for dtype in (torch.float32, torch.bfloat16):
            N = _size(dtype)
            left, right = torch.randn(2, N, N, dtype=dtype)
            self._products.append((left, right, torch.empty_like(left)))
        self._source = torch.randn(_COPY)
        self._target = torch.empty_like(self._source)
        self.measure()  # the first run touches the pages

    def measure(self) -> dict[str, float]:
        """The rates named in ``RATES``, each from the median of five runs; takes about half a second."""
        rates = {}
        for left, right, out in self._products:
            seconds = _median_seconds(functools.partial(torch.mm, left, right, out=out))
            rates[str(left.dtype).removeprefix("torch.")] = 2 * len(left) ** 3 / seconds / 1e12
        seconds = _median_seconds(lambda: self._target.copy_(self._source))
        rates["copy"] = 2 * self._source.nbytes / seconds / 1e9
        return rates


def _size(dtype: torch.dtype) -> int:
    """The largest power of two up to ``_N`` whose product takes no longer than ``_LONGEST``."""
    N = min(_SMALLEST, _N)
    while N < _N:
        left, right = torch.randn(2, N, N, dtype=dtype)
        if 8 * _median_seconds(functools.partial(torch.mm, left, right)) > _LONGEST:
            break
        N *= 2
    return N


def _median_seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
