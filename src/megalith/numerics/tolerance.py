"""Tolerances for equality between layouts: the error metric and its bounds."""

from torch import Tensor

__all__ = ["LAYOUT_FLOAT32", "LAYOUT_FLOAT64", "NOISE_FLOAT32", "NOISE_FLOAT64", "gradient_error"]

# rounding of 1e-16, times the depth of a model, times the reordering of its sums, leaves four digits to spare
LAYOUT_FLOAT64 = 1e-9
# rounding is 6e-8; gradient errors of 3e-7 were seen at the first step of two-layer models, and 2e-6 at the third
LAYOUT_FLOAT32 = 2e-5

# fraction of the norm of all gradients below which a gradient counts as a rounded zero
NOISE_FLOAT64 = 1e-6
NOISE_FLOAT32 = 1e-3


def gradient_error(got: Tensor, want: Tensor, all_norm: float, noise: float = NOISE_FLOAT64) -> float:
    """Returns |got - want| / (|want| + noise all_norm), in L2 norms of whole tensors.

    ``all_norm`` is the norm of all gradients together: it keeps gradients that are zero in exact arithmetic from being
    measured by their rounding noise. A NaN on either side results in NaN, which is below no bound.
    """
    got, want = got.double(), want.double()
    return float((got - want).norm() / (want.norm() + noise * all_norm))
