"""Hugging Face's ``Qwen2MoeForCausalLM`` and ``Qwen3MoeForCausalLM``: experts in some or all layers.

Yang et al. 2024, "Qwen2", arXiv:2407.10671, which adds a gated shared expert; Yang et al. 2025, "Qwen3",
arXiv:2505.09388, section 2.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megalith.config import TransformerConfig
from megalith.models.hf.experts import allowed_of_experts, read_expert_layers, write_expert_layers
from megalith.models.hf.fields import Fields
from megalith.models.hf.layer_types import read_layer_types, write_layer_types
from megalith.models.hf.llama import read_llamas, write_llamas
from megalith.models.hf.parameters import left_open
from megalith.models.hf.places import Place
from megalith.models.hf.qwen import QWEN2, QWEN3

__all__ = ["QWEN2_MOE", "QWEN3_MOE"]

_OF_LAYERS = ("moe.layers", "moe.router.pre_softmax")


def _read_window(fields: Fields) -> int | None:
    window = fields.get_or_null("sliding_window", 4096)
    return window if fields.get("use_sliding_window", False) else None


def _read_experts(fields: Fields, num_experts: int, top_k: int, ffn_hidden_size: int) -> dict[str, Any]:
    """Returns the settings of ``model.moe``; the sizes are the defaults of their class."""
    # the name in transformers 4, and the one in Qwen3 files saved by transformers 5
    names = ("num_experts", "num_local_experts")
    given = {name: number for name in names if (number := fields.optional(name, int)) is not None}
    if len(set(given.values())) > 1:
        fields.refuse(f"num_experts and num_local_experts must be equal; got {given}; delete the wrong one")
    return {
        "num_experts": next(iter(given.values()), num_experts),
        "top_k": fields.get("num_experts_per_tok", top_k),
        "ffn_hidden_size": fields.get("moe_intermediate_size", ffn_hidden_size),
        "layers": read_expert_layers(fields),
        # softmax over all experts, normalized over the chosen ones, is softmax over the chosen ones
        "router": {"pre_softmax": not fields.get("norm_topk_prob", False)},
    }


def _write_experts(config: TransformerConfig, max_position_embeddings: int) -> dict[str, Any]:
    """The inverse of ``_read_experts``, with the other fields that both families share."""
    assert config.moe is not None, "this family has experts"
    return {
        **write_llamas(config, max_position_embeddings),
        "use_sliding_window": config.attention.window is not None,
        "sliding_window": config.attention.window,
        "num_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.top_k,
        "moe_intermediate_size": config.expert_ffn_hidden_size,
        "norm_topk_prob": not config.moe.router.pre_softmax,
        **write_expert_layers(config),
    }


def _read_qwen2(fields: Fields) -> Mapping[str, Any]:
    window, first_without = _read_window(fields), fields.get("max_window_layers", 28)
    windows = read_layer_types(
        fields, window, lambda index: window is not None and index % 2 == 0 and index < first_without
    )
    shared = fields.get("shared_expert_intermediate_size", 5632)
    experts = _read_experts(fields, num_experts=60, top_k=4, ffn_hidden_size=1408)
    return {
        **read_llamas(fields),
        "attention": {**windows, "qkv_bias": fields.get("qkv_bias", True)},
        "moe": {**experts, "shared_ffn_hidden_size": shared, "shared_expert_gate": True},
    }


def _read_qwen3(fields: Fields) -> Mapping[str, Any]:
    bias = fields.get("attention_bias", False)
    fields.optional("max_window_layers", int)  # in published files but unused: all layers have the window
    return {
        **read_llamas(fields),
        "attention": {"window": _read_window(fields), "qk_norm": "RMSNorm", "qkv_bias": bias, "output_bias": bias},
        "moe": _read_experts(fields, num_experts=128, top_k=8, ffn_hidden_size=768),
    }


def _write_qwen2(config: TransformerConfig, max_position_embeddings: int) -> Mapping[str, Any]:
    assert config.moe is not None, "Qwen2-MoE has experts"
    return {
        **_write_experts(config, max_position_embeddings),
        "qkv_bias": config.qkv_bias,
        "layer_types": write_layer_types(config),
        "shared_expert_intermediate_size": config.moe.shared_ffn_hidden_size,
    }


def _write_qwen3(config: TransformerConfig, max_position_embeddings: int) -> Mapping[str, Any]:
    return {**_write_experts(config, max_position_embeddings), "attention_bias": config.qkv_bias}


def _allowed_of_qwen2(config: TransformerConfig) -> Mapping[str, tuple[Any, ...]]:
    shared = None if config.moe is None else config.moe.shared_ffn_hidden_size
    return {
        **QWEN2.allowed(config),
        **left_open(config, "qkv_bias"),
        **allowed_of_experts(config, *_OF_LAYERS),
        "moe.shared_ffn_hidden_size": (shared or "a positive integer",),
        "moe.shared_expert_gate": (True,),
    }


def _allowed_of_qwen3(config: TransformerConfig) -> Mapping[str, tuple[Any, ...]]:
    one_window = {"attention.window_layers": (None,)}
    return {**QWEN3.allowed(config), **allowed_of_experts(config, *_OF_LAYERS), **one_window}


def _place_of_qwen2(name: str) -> Place:
    gate = name.replace(".mlp.shared_experts.gate.", ".mlp.shared_expert_gate.")
    return Place(gate.replace(".mlp.shared_experts.", ".mlp.shared_expert."))


QWEN2_MOE = replace(
    QWEN2,
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    fields={**QWEN2.fields, "num_key_value_heads": ("num_query_groups", 16)},
    read_rest=_read_qwen2,
    write_rest=_write_qwen2,
    allowed=_allowed_of_qwen2,
    place=_place_of_qwen2,
)
QWEN3_MOE = replace(
    QWEN3,
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    fields={
        **QWEN3.fields,
        "num_key_value_heads": ("num_query_groups", 4),
        "head_dim": ("kv_channels", int),
    },
    read_rest=_read_qwen3,
    write_rest=_write_qwen3,
    allowed=_allowed_of_qwen3,
)
