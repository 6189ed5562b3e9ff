"""Fused operations: tensor functions that know no model and no config. Every public name is importable from here."""

from megalith.fusions.backend import Backend, use
from megalith.fusions.explain import explain
from megalith.fusions.fused_bias_dropout import (
    bias_dropout_add_fused_inference,
    bias_dropout_add_fused_train,
    bias_dropout_add_unfused,
    get_bias_dropout_add,
)
from megalith.fusions.fused_weighted_squared_relu import (
    WeightedSquaredReLUFunction,
    weighted_squared_relu,
    weighted_squared_relu_back,
    weighted_squared_relu_impl,
)
from megalith.fusions.glu import Activation, glu

__all__ = [
    "Activation",
    "Backend",
    "WeightedSquaredReLUFunction",
    "bias_dropout_add_fused_inference",
    "bias_dropout_add_fused_train",
    "bias_dropout_add_unfused",
    "explain",
    "get_bias_dropout_add",
    "glu",
    "use",
    "weighted_squared_relu",
    "weighted_squared_relu_back",
    "weighted_squared_relu_impl",
]
