"""Rotary positions of queries and keys in one launch, with the RMSNorm of each head before them if there is one."""

from megalith.fusions.rope.rope import fused_rope

__all__ = ["fused_rope"]
