"""Quantization to 8 and 4 bits with a scale per tensor, row or block; also transposed, in the same pass."""

from megalith.fusions.quantization.quantize import quantize

__all__ = ["quantize"]
