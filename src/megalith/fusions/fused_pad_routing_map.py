"""Pads each expert's tokens to the alignment of low-precision matrix products: more of the routing map becomes one."""

from megalith.fusions.experts.pad_routing_map import fused_pad_routing_map

__all__ = ["fused_pad_routing_map"]
