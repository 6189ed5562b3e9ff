"""Fused operations: tensor functions that are independent of any model or config. Every public name can be imported
from here, except for three functions named like their modules: ``from megalith.fusions.fused_layer_norm import
fused_layer_norm``, and likewise fused_linear_cross_entropy and fused_pad_routing_map.

Norms             fused_layer_norm, fused_rms_norm, FusedLayerNorm, FusedRMSNorm;
                  fused_add_norm, with bias, dropout and residual in the same pass
Gated units       glu, glu_float8, glu_back, Activation;
  SwiGLU          bias_swiglu_impl, weighted_bias_swiglu_impl; swiglu, bias_swiglu, weighted_swiglu, clamped_swiglu,
                  bias_clamped_swiglu and clamped_weighted_swiglu, each with its _back; SwiGLUFunction,
                  BiasSwiGLUFunction, WeightedSwiGLUFunction
  GEGLU           bias_geglu_impl; geglu, bias_geglu, each with its _back; GeGLUFunction, BiasGeGLUFunction
  quick GEGLU     weighted_bias_quick_geglu_impl; quick_gelu; quick_geglu, weighted_quick_geglu and
                  weighted_bias_quick_geglu, each with its _back; WeightedQuickGeGLUFunction,
                  WeightedBiasQuickGeGLUFunction
Activations       bias_gelu_impl, bias_gelu, bias_gelu_back, GeLUFunction; weighted_squared_relu_impl,
                  weighted_squared_relu, weighted_squared_relu_back, WeightedSquaredReLUFunction
Attention         fused_attention; merge_attention and sink_correction, which combine partial results
Softmax           masked_softmax, FusedScaleMaskSoftmax, AttnMaskType, SoftmaxOne, ScaledSoftmax, ScaledMaskedSoftmax,
                  ScaledUpperTriangMaskedSoftmax
Cross entropy     fused_vocab_parallel_cross_entropy, fused_linear_cross_entropy; in two collectives:
                  calculate_logits_max, calculate_predicted_logits, calculate_cross_entropy_loss, calculate_gradients
Rotary embedding  fused_rope, Layout; fused_apply_mla_rope_for_q, fused_apply_mla_rope_for_kv, ApplyMLARotaryEmbQ,
                  ApplyMLARotaryEmbKV; fused_mla_rope_out_of_place, fused_mla_rope_inplace, fused_mla_rope_kv_split;
                  tables: rope_cos_sin, rope_frequencies, llama3_rope_frequencies,
                  yarn_rope_frequencies, yarn_cos_sin, yarn_concentration, positions_from_cu_seqlens
Routing           fused_topk_router, Routing, topk_routing_with_score_function, compute_routing_scores_for_aux_loss;
                  fused_indices_to_multihot, fused_multihot_to_indices, IndicesToMultihot
Experts           permute, unpermute, permute_by, row_map, RowMap, fused_pad_routing_map, grouped_matmul
Residual          bias_dropout_add_fused_train, bias_dropout_add_fused_inference, bias_dropout_add_unfused,
                  get_bias_dropout_add
Quantization      quantize, dequantize, Quantized
Optimizer         fused_adamw_
Paths             Backend, use, explain

Each takes ``backend=``; ``explain()`` shows which path each takes without it.
"""

from megalith.fusions.attention.attention import fused_attention
from megalith.fusions.attention.formulas import merge_attention, sink_correction
from megalith.fusions.core.activations import Activation
from megalith.fusions.core.dispatch import Backend, use
from megalith.fusions.core.explain import explain
from megalith.fusions.experts.grouped_matmul import grouped_matmul
from megalith.fusions.experts.row_map import RowMap, row_map
from megalith.fusions.fused_adamw import fused_adamw_
from megalith.fusions.fused_bias_dropout import (
    bias_dropout_add_fused_inference,
    bias_dropout_add_fused_train,
    bias_dropout_add_unfused,
    get_bias_dropout_add,
)
from megalith.fusions.fused_bias_geglu import (
    BiasGeGLUFunction,
    GeGLUFunction,
    WeightedBiasQuickGeGLUFunction,
    WeightedQuickGeGLUFunction,
    bias_geglu,
    bias_geglu_back,
    bias_geglu_impl,
    geglu,
    geglu_back,
    quick_geglu,
    quick_geglu_back,
    quick_gelu,
    weighted_bias_quick_geglu,
    weighted_bias_quick_geglu_back,
    weighted_bias_quick_geglu_impl,
    weighted_quick_geglu,
    weighted_quick_geglu_back,
)
from megalith.fusions.fused_bias_gelu import GeLUFunction, bias_gelu, bias_gelu_back, bias_gelu_impl
from megalith.fusions.fused_bias_swiglu import (
    BiasSwiGLUFunction,
    SwiGLUFunction,
    WeightedSwiGLUFunction,
    bias_clamped_swiglu,
    bias_clamped_swiglu_back,
    bias_swiglu,
    bias_swiglu_back,
    bias_swiglu_impl,
    clamped_swiglu,
    clamped_swiglu_back,
    clamped_weighted_swiglu,
    clamped_weighted_swiglu_back,
    swiglu,
    swiglu_back,
    weighted_bias_swiglu_impl,
    weighted_swiglu,
    weighted_swiglu_back,
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
from megalith.fusions.fused_layer_norm import FusedLayerNorm, FusedRMSNorm, fused_rms_norm
from megalith.fusions.fused_mla_yarn_rope_apply import (
    ApplyMLARotaryEmbKV,
    ApplyMLARotaryEmbQ,
    fused_apply_mla_rope_for_kv,
    fused_apply_mla_rope_for_q,
    fused_mla_rope_inplace,
    fused_mla_rope_kv_split,
    fused_mla_rope_out_of_place,
)
from megalith.fusions.fused_permute import permute, permute_by, unpermute
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
from megalith.fusions.gated.glu import glu, glu_back
from megalith.fusions.gated.glu_float8 import glu_float8
from megalith.fusions.norm.add_norm import fused_add_norm
from megalith.fusions.quantization.quantized import Quantized, dequantize
from megalith.fusions.rope.rope import fused_rope
from megalith.fusions.rope.rotation import Layout
from megalith.fusions.rope.tables import (
    llama3_rope_frequencies,
    positions_from_cu_seqlens,
    rope_cos_sin,
    rope_frequencies,
    yarn_concentration,
    yarn_cos_sin,
    yarn_rope_frequencies,
)
from megalith.fusions.routing.aux_loss_scores import compute_routing_scores_for_aux_loss
from megalith.fusions.routing.topk_router import Routing, fused_topk_router, topk_routing_with_score_function
from megalith.fusions.softmax.masked_softmax import masked_softmax

__all__ = [
    "Activation",
    "ApplyMLARotaryEmbKV",
    "ApplyMLARotaryEmbQ",
    "AttnMaskType",
    "Backend",
    "BiasGeGLUFunction",
    "BiasSwiGLUFunction",
    "FusedLayerNorm",
    "FusedRMSNorm",
    "FusedScaleMaskSoftmax",
    "GeGLUFunction",
    "GeLUFunction",
    "IndicesToMultihot",
    "Layout",
    "Quantized",
    "Routing",
    "RowMap",
    "ScaledMaskedSoftmax",
    "ScaledSoftmax",
    "ScaledUpperTriangMaskedSoftmax",
    "SoftmaxOne",
    "SwiGLUFunction",
    "WeightedBiasQuickGeGLUFunction",
    "WeightedQuickGeGLUFunction",
    "WeightedSquaredReLUFunction",
    "WeightedSwiGLUFunction",
    "bias_clamped_swiglu",
    "bias_clamped_swiglu_back",
    "bias_dropout_add_fused_inference",
    "bias_dropout_add_fused_train",
    "bias_dropout_add_unfused",
    "bias_geglu",
    "bias_geglu_back",
    "bias_geglu_impl",
    "bias_gelu",
    "bias_gelu_back",
    "bias_gelu_impl",
    "bias_swiglu",
    "bias_swiglu_back",
    "bias_swiglu_impl",
    "calculate_cross_entropy_loss",
    "calculate_gradients",
    "calculate_logits_max",
    "calculate_predicted_logits",
    "clamped_swiglu",
    "clamped_swiglu_back",
    "clamped_weighted_swiglu",
    "clamped_weighted_swiglu_back",
    "compute_routing_scores_for_aux_loss",
    "dequantize",
    "explain",
    "fused_adamw_",
    "fused_add_norm",
    "fused_apply_mla_rope_for_kv",
    "fused_apply_mla_rope_for_q",
    "fused_attention",
    "fused_indices_to_multihot",
    "fused_mla_rope_inplace",
    "fused_mla_rope_kv_split",
    "fused_mla_rope_out_of_place",
    "fused_multihot_to_indices",
    "fused_rms_norm",
    "fused_rope",
    "fused_topk_router",
    "fused_vocab_parallel_cross_entropy",
    "geglu",
    "geglu_back",
    "get_bias_dropout_add",
    "glu",
    "glu_back",
    "glu_float8",
    "grouped_matmul",
    "llama3_rope_frequencies",
    "masked_softmax",
    "merge_attention",
    "permute",
    "permute_by",
    "positions_from_cu_seqlens",
    "quantize",
    "quick_geglu",
    "quick_geglu_back",
    "quick_gelu",
    "rope_cos_sin",
    "rope_frequencies",
    "row_map",
    "sink_correction",
    "swiglu",
    "swiglu_back",
    "topk_routing_with_score_function",
    "unpermute",
    "use",
    "weighted_bias_quick_geglu",
    "weighted_bias_quick_geglu_back",
    "weighted_bias_quick_geglu_impl",
    "weighted_bias_swiglu_impl",
    "weighted_quick_geglu",
    "weighted_quick_geglu_back",
    "weighted_squared_relu",
    "weighted_squared_relu_back",
    "weighted_squared_relu_impl",
    "weighted_swiglu",
    "weighted_swiglu_back",
    "yarn_concentration",
    "yarn_cos_sin",
    "yarn_rope_frequencies",
]
