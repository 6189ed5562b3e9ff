"""The chunks of fused_linear_cross_entropy on the Triton kernels of cross entropy."""

from megalith.fusions.formulas.linear_cross_entropy import steps_by_chunks
from megalith.fusions.kernels.cross_entropy import gradient_into, loss, statistics

__all__ = ["STEPS"]

STEPS = steps_by_chunks("linear_cross_entropy", statistics, loss, gradient_into)
