"""Squared ReLU scaled by one weight per token, with one pass each for forward and backward."""

from megalith.fusions.activation.weighted_squared_relu import (
    WeightedSquaredReLUFunction,
    weighted_squared_relu,
    weighted_squared_relu_back,
    weighted_squared_relu_impl,
)

__all__ = [
    "WeightedSquaredReLUFunction",
    "weighted_squared_relu",
    "weighted_squared_relu_back",
    "weighted_squared_relu_impl",
]
