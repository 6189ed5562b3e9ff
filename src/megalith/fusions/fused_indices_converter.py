"""Converts a router's choices from top-k indices to a dense map over experts, and back."""

from megalith.fusions.routing.indices_converter import (
    IndicesToMultihot,
    fused_indices_to_multihot,
    fused_multihot_to_indices,
)

__all__ = ["IndicesToMultihot", "fused_indices_to_multihot", "fused_multihot_to_indices"]
