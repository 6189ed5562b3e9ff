"""What an operation must move and keep, in bytes: the floor under its time, and what its tests hold it to.

Forward and backward count every tensor once: read or written by all programs together. Vectors that all rows share
(bias, gain) are counted once too; a GPU keeps them in its second-level cache. Saved is what stays allocated from
forward to backward. ``visits`` is how often one address of a row may be touched: 1, unless a row is read again.
"""

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from megalith.fusions.rows import rows_per_sum

__all__ = ["Cost", "glu", "partial_sums", "weighted_squared_relu"]


class Cost(NamedTuple):
    """Bytes of one call. Divided by the bandwidth of a copy, the first two are the least time that it can take."""

    forward: int
    backward: int
    saved: int
    forward_visits: int = 1
    backward_visits: int = 1


def glu(x: Tensor, up: Tensor | None = None, bias: Tensor | None = None, weights: Tensor | None = None) -> Cost:
    """Reads gate and up and writes y; backward reads dy, gate and up, and writes the gradients of both."""
    read = _bytes((x, up, bias, weights))
    y = _bytes((x, up)) // 2
    sums = 0 if bias is None else partial_sums(x.shape[0], bias.numel())
    return Cost(forward=read + y, backward=2 * read + y + sums, saved=read)


def partial_sums(num_rows: int, width: int) -> int:
    """Bytes of the partial sums, in float32, of a gradient of ``width`` columns over ``num_rows`` rows."""
    return 4 * width * -(-num_rows // rows_per_sum(num_rows, 1))


def weighted_squared_relu(input: Tensor, weights: Tensor) -> Cost:
    """Reads x and w and writes y; backward reads dy, x and w, and writes dx and dw."""
    x, w = input.nbytes, weights.nbytes
    return Cost(forward=2 * x + w, backward=3 * x + 2 * w, saved=x + w)


def _bytes(tensors: Iterable[Tensor | None]) -> int:
    return sum(x.nbytes for x in tensors if x is not None)
