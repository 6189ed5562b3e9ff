"""When two layouts count as equal: the metric of the promise, and its bound."""

from torch import Tensor

__all__ = ["LAYOUT_FLOAT64", "gradient_error"]

# 1e-16 of a rounding, times the depth of a model, times the reordering of its sums, leaves four digits to spare
LAYOUT_FLOAT64 = 1e-9


def gradient_error(got: Tensor, want: Tensor, all_norm: float) -> float:
    """|got - want| / (|want| + 1e-6 all_norm), in L2 norms of whole tensors.

    ``all_norm`` is the norm of all gradients together: it keeps apart from noise those that are zero in exact
    arithmetic. A NaN on either side gives NaN, which is below no bound.
    """
    got, want = got.double(), want.double()
    return float((got - want).norm() / (want.norm() + 1e-6 * all_norm))
