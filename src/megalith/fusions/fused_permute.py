"""Moves tokens to their experts and back: rows sorted by expert, with weights and gradients in the same pass."""

from megalith.fusions.experts.permute import permute, permute_by, unpermute

__all__ = ["permute", "permute_by", "unpermute"]
