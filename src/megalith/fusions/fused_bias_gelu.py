"""GELU of an input with its bias; the bias has its gradient in the same pass."""

from megalith.fusions.activation.bias_gelu import Approximate, GeLUFunction, bias_gelu, bias_gelu_back, bias_gelu_impl

__all__ = ["Approximate", "GeLUFunction", "bias_gelu", "bias_gelu_back", "bias_gelu_impl"]
