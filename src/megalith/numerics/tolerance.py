"""When two layouts count as equal: the metric of the promise, and its bound."""

from torch import Tensor

__all__ = ["LAYOUT_FLOAT32", "LAYOUT_FLOAT64", "NOISE_FLOAT32", "NOISE_FLOAT64", "gradient_error"]

# 1e-16 of a rounding, times the depth of a model, times the reordering of its sums, leaves four digits to spare
LAYOUT_FLOAT64 = 1e-9
# a rounding is 6e-8; 3e-7 of a gradient was seen at the first step of models of two layers, 2e-6 at the third
LAYOUT_FLOAT32 = 2e-5

# the share of the norm of all gradients below which a gradient is taken for the rounding of zero
NOISE_FLOAT64 = 1e-6
NOISE_FLOAT32 = 1e-3


def gradient_error(got: Tensor, want: Tensor, all_norm: float, noise: float = NOISE_FLOAT64) -> float:
    """|got - want| / (|want| + noise all_norm), in L2 norms of whole tensors.

    ``all_norm`` is the norm of all gradients together: it keeps apart from noise those that are zero in exact
    arithmetic. A NaN on either side gives NaN, which is below no bound.
    """
    got, want = got.double(), want.double()
    return float((got - want).norm() / (want.norm() + noise * all_norm))
