"""fused_linear_cross_entropy in chunks of tokens, with the Triton kernels of cross entropy."""

from megalith.fusions.cross_entropy.kernels.cross_entropy import gradient_into, loss, statistics
from megalith.fusions.cross_entropy.linear_formulas import steps_by_chunks

__all__ = ["STEPS"]

STEPS = steps_by_chunks("linear_cross_entropy", statistics, loss, gradient_into)
