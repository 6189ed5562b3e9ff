"""A residual, what a layer adds to it, and the norm of the sum, in one pass each way."""

from megalith.fusions.norm.add_norm import fused_add_norm

__all__ = ["fused_add_norm"]
