"""Fused operations: tensor functions that know no model and no config. Every public name is importable from here."""

from megalith.fusions.activations import Activation
from megalith.fusions.backend import Backend, use
from megalith.fusions.explain import explain
from megalith.fusions.fused_add_norm import fused_add_norm
from megalith.fusions.fused_bias_dropout import (
    bias_dropout_add_fused_inference,
    bias_dropout_add_fused_train,
    bias_dropout_add_unfused,
    get_bias_dropout_add,
)
from megalith.fusions.fused_cross_entropy import (
    calculate_cross_entropy_loss,
    calculate_gradients,
    calculate_logits_max,
    calculate_predicted_logits,
    fused_vocab_parallel_cross_entropy,
)
from megalith.fusions.fused_indices_converter import (
    IndicesToMultihot,
    fused_indices_to_multihot,
    fused_multihot_to_indices,
)
from megalith.fusions.fused_layer_norm import FusedLayerNorm, FusedRMSNorm, fused_layer_norm, fused_rms_norm
from megalith.fusions.fused_linear_cross_entropy import fused_linear_cross_entropy
from megalith.fusions.fused_pad_routing_map import fused_pad_routing_map
from megalith.fusions.fused_permute import permute, unpermute
from megalith.fusions.fused_quantize import quantize
from megalith.fusions.fused_softmax import (
    AttnMaskType,
    FusedScaleMaskSoftmax,
    ScaledMaskedSoftmax,
    ScaledSoftmax,
    ScaledUpperTriangMaskedSoftmax,
    SoftmaxOne,
)
from megalith.fusions.fused_weighted_squared_relu import (
    WeightedSquaredReLUFunction,
    weighted_squared_relu,
    weighted_squared_relu_back,
    weighted_squared_relu_impl,
)
from megalith.fusions.glu import glu
from megalith.fusions.masked_softmax import masked_softmax
from megalith.fusions.quantized import Quantized, dequantize
from megalith.fusions.row_map import RowMap, row_map

__all__ = [
    "Activation",
    "AttnMaskType",
    "Backend",
    "FusedLayerNorm",
    "FusedRMSNorm",
    "FusedScaleMaskSoftmax",
    "IndicesToMultihot",
    "Quantized",
    "RowMap",
    "ScaledMaskedSoftmax",
    "ScaledSoftmax",
    "ScaledUpperTriangMaskedSoftmax",
    "SoftmaxOne",
    "WeightedSquaredReLUFunction",
    "bias_dropout_add_fused_inference",
    "bias_dropout_add_fused_train",
    "bias_dropout_add_unfused",
    "calculate_cross_entropy_loss",
    "calculate_gradients",
    "calculate_logits_max",
    "calculate_predicted_logits",
    "dequantize",
    "explain",
    "fused_add_norm",
    "fused_indices_to_multihot",
    "fused_layer_norm",
    "fused_linear_cross_entropy",
    "fused_multihot_to_indices",
    "fused_pad_routing_map",
    "fused_rms_norm",
    "fused_vocab_parallel_cross_entropy",
    "get_bias_dropout_add",
    "glu",
    "masked_softmax",
    "permute",
    "quantize",
    "row_map",
    "unpermute",
    "use",
    "weighted_squared_relu",
    "weighted_squared_relu_back",
    "weighted_squared_relu_impl",
]
