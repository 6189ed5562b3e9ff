"""Output projection fused with cross entropy: only one chunk of tokens has its logits in memory at a time."""

from megalith.fusions.cross_entropy.linear import fused_linear_cross_entropy

__all__ = ["fused_linear_cross_entropy"]
