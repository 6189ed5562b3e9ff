"""Hugging Face's ``Qwen2ForCausalLM`` and ``Qwen3ForCausalLM``: Llamas with biases, or with norms, of queries and keys.

Yang et al. 2024, "Qwen2", arXiv:2407.10671; Yang et al. 2025, "Qwen3", arXiv:2505.09388, section 2.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megalith.config import TransformerConfig
from megalith.models.hf.fields import Fields
from megalith.models.hf.llama import LLAMA, allowed_of_llamas, read_llamas, write_llamas

__all__ = ["QWEN2", "QWEN3"]


def _read_without_window(fields: Fields) -> dict[str, Any]:
    fields.expect("use_sliding_window", False)
    for unused in ("sliding_window", "max_window_layers"):  # without use_sliding_window
        fields.optional(unused, int)
    kinds = fields.optional("layer_types", list) or []
    if any(kind != "full_attention" for kind in kinds):
        fields.refuse(f"layer_types must all be 'full_attention': our attention has no window; got {kinds!r:.80}")
    return read_llamas(fields)


def _read_qwen2(fields: Fields) -> Mapping[str, Any]:
    return {**_read_without_window(fields), "attention": {"qkv_bias": True}}


def _read_qwen3(fields: Fields) -> Mapping[str, Any]:
    bias = fields.get("attention_bias", False)
    attention = {"qk_norm": "RMSNorm", "qkv_bias": bias, "output_bias": bias}
    return {**_read_without_window(fields), "attention": attention}


def _write_qwen2(config: TransformerConfig, max_position_embeddings: int) -> Mapping[str, Any]:
    return {**write_llamas(config, max_position_embeddings), "use_sliding_window": False}


def _write_qwen3(config: TransformerConfig, max_position_embeddings: int) -> Mapping[str, Any]:
    return {**_write_qwen2(config, max_position_embeddings), "attention_bias": config.qkv_bias}


def _allowed_of_qwen2(config: TransformerConfig) -> Mapping[str, tuple[Any, ...]]:
    return {
        **allowed_of_llamas(config),
        "add_bias_linear": (False,),
        "mlp_bias": (False,),
        "qkv_bias": (True,),
        "output_bias": (False,),
        "kv_channels": (config.hidden_size / config.num_attention_heads,),
    }


def _allowed_of_qwen3(config: TransformerConfig) -> Mapping[str, tuple[Any, ...]]:
    return {
        **allowed_of_llamas(config),
        "attention.qk_norm": ("RMSNorm",),
        "add_bias_linear": (False,),
        "mlp_bias": (False,),
        "output_bias": (config.qkv_bias,),
    }


_FIELDS = {**LLAMA.fields, "num_key_value_heads": ("num_query_groups", 32)}

QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    fields={theirs: field for theirs, field in _FIELDS.items() if theirs != "head_dim"},
    read_rest=_read_qwen2,
    write_rest=_write_qwen2,
    allowed=_allowed_of_qwen2,
)
QWEN3 = replace(
    LLAMA,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fields={**_FIELDS, "head_dim": ("kv_channels", 128)},
    read_rest=_read_qwen3,
    write_rest=_write_qwen3,
    allowed=_allowed_of_qwen3,
)
