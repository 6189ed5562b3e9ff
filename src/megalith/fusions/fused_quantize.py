"""Tensors in 8 and 4 bits with a scale for each tensor, row or block; also transposed, from the same pass."""

from megalith.fusions.quantization.quantize import quantize

__all__ = ["quantize"]
