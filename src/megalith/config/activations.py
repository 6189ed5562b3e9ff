"""The values of ``model.activation``, and which of them are gated: act(gate) * up, from two projections."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

__all__ = ["GATES", "Activation", "GateActivation"]

Activation = Literal["swiglu", "geglu", "geglu_tanh", "quick_geglu", "gelu", "gelu_tanh", "relu", "squared_relu"]
GateActivation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu"]

# activation -> what is applied to its gate
GATES: Mapping[Activation, GateActivation] = MappingProxyType(
    {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "quick_geglu": "quick_gelu"}
)
