"""GELU of an input plus bias; the bias gradient is computed in the same pass."""

from megalith.fusions.activation.bias_gelu import Approximate, GeLUFunction, bias_gelu, bias_gelu_back, bias_gelu_impl

__all__ = ["Approximate", "GeLUFunction", "bias_gelu", "bias_gelu_back", "bias_gelu_impl"]
