"""AdamW over many tensors in one launch: weights, moments, and the copy of the weights that the model computes with."""

from megalith.fusions.adamw.adamw import fused_adamw_

__all__ = ["fused_adamw_"]
