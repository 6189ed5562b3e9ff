"""Output projection and cross entropy in one: the logits of a chunk of tokens live at a time, never those of all."""

from megalith.fusions.cross_entropy.linear import fused_linear_cross_entropy

__all__ = ["fused_linear_cross_entropy"]
