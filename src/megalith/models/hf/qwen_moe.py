"""Hugging Face's ``Qwen3MoeForCausalLM``: a Qwen3 with experts, in every layer or in some.

Yang et al. 2025, "Qwen3", arXiv:2505.09388, section 2.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megalith.config import TransformerConfig
from megalith.models.hf.experts import allowed_of_experts, read_expert_layers, write_expert_layers
from megalith.models.hf.fields import Fields
from megalith.models.hf.llama import read_llamas, write_llamas
from megalith.models.hf.qwen import QWEN3

__all__ = ["QWEN3_MOE"]


def _read_rest(fields: Fields) -> Mapping[str, Any]:
    bias, window = fields.get("attention_bias", False), fields.get_or_null("sliding_window", 4096)
    if not fields.get("use_sliding_window", False):
        window = None
    fields.optional("max_window_layers", int)  # in files of the models, and not used: all layers have the window
    # the number's name in transformers 4, and in what transformers 5 saves
    names = ("num_experts", "num_local_experts")
    given = {name: number for name in names if (number := fields.optional(name, int)) is not None}
    if len(set(given.values())) > 1:
        fields.refuse(f"num_experts and num_local_experts must be the same; got {given}; delete the wrong one")
    return {
        **read_llamas(fields),
        "attention": {"window": window, "qk_norm": "RMSNorm", "qkv_bias": bias, "output_bias": bias},
        "moe": {
            "num_experts": next(iter(given.values()), 128),
            "top_k": fields.get("num_experts_per_tok", 8),
            "ffn_hidden_size": fields.get("moe_intermediate_size", 768),
            "layers": read_expert_layers(fields),
            # softmax over all that is divided by the sum of the chosen is softmax over the chosen
            "router": {"pre_softmax": not fields.get("norm_topk_prob", False)},
        },
    }


def _write_rest(config: TransformerConfig, max_position_embeddings: int) -> Mapping[str, Any]:
    assert config.moe is not None, "a Qwen3-MoE has experts"
    return {
        **write_llamas(config, max_position_embeddings),
        "attention_bias": config.qkv_bias,
        "use_sliding_window": config.attention.window is not None,
        "sliding_window": config.attention.window,
        "num_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.top_k,
        "moe_intermediate_size": config.expert_ffn_hidden_size,
        "norm_topk_prob": not config.moe.router.pre_softmax,
        **write_expert_layers(config),
    }


def _allowed(config: TransformerConfig) -> Mapping[str, tuple[Any, ...]]:
    return {
        **QWEN3.allowed(config),
        **allowed_of_experts(config, "moe.layers", "moe.router.pre_softmax"),
        "attention.window_layers": (None,),
    }


QWEN3_MOE = replace(
    QWEN3,
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    fields={
        **QWEN3.fields,
        "num_key_value_heads": ("num_query_groups", 4),
        "head_dim": ("kv_channels", int),
    },
    read_rest=_read_rest,
    write_rest=_write_rest,
    allowed=_allowed,
)
