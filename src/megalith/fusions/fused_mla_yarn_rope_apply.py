"""Rotary embedding for multi-latent attention, of the last columns of each query and of the key that heads share."""

from megalith.fusions.rope.mla_rope import (
    ApplyMLARotaryEmbKV,
    ApplyMLARotaryEmbQ,
    fused_apply_mla_rope_for_kv,
    fused_apply_mla_rope_for_q,
    fused_mla_rope_inplace,
    fused_mla_rope_kv_split,
    fused_mla_rope_out_of_place,
)

__all__ = [
    "ApplyMLARotaryEmbKV",
    "ApplyMLARotaryEmbQ",
    "fused_apply_mla_rope_for_kv",
    "fused_apply_mla_rope_for_q",
    "fused_mla_rope_inplace",
    "fused_mla_rope_kv_split",
    "fused_mla_rope_out_of_place",
]
