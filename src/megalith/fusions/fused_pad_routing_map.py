"""Pads each expert's token count to the alignment of low-precision matrix products by setting more of the map."""

from megalith.fusions.experts.pad_routing_map import fused_pad_routing_map

__all__ = ["fused_pad_routing_map"]
