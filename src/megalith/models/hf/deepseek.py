"""Hugging Face's ``DeepseekV3ForCausalLM`` without its mixtures of experts: latent attention in dense layers.

DeepSeek-AI 2024, "DeepSeek-V3", arXiv:2412.19437.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from megalith.config import MLAConfig, TransformerConfig
from megalith.models.hf.fields import Fields
from megalith.models.hf.llama import LLAMA, allowed_of_llamas, read_llamas, write_llamas
from megalith.models.hf.parameters import left_open

__all__ = ["DEEPSEEK_V3"]

_EPSILON = 1e-6  # in the norms of latents, whatever rms_norm_eps is
# what no dense layer reads; transformers builds no layers for multi-token prediction, and works out sizes of heads
_UNUSED: Mapping[str, type] = MappingProxyType(
    {
        "aux_loss_alpha": float,
        "ep_size": int,
        "head_dim": int,
        "moe_intermediate_size": int,
        "moe_layer_freq": int,
        "n_group": int,
        "n_routed_experts": int,
        "n_shared_experts": int,
        "norm_topk_prob": bool,
        "num_experts_per_tok": int,
        "num_nextn_predict_layers": int,
        "output_router_logits": bool,
        "qk_head_dim": int,
        "routed_scaling_factor": float,
        "scoring_func": str,
        "seq_aux": bool,
        "topk_group": int,
        "topk_method": str,
    }
)
_SIZES: Mapping[str, int] = MappingProxyType(
    {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
)


def _read_rest(fields: Fields) -> Mapping[str, Any]:
    for name, kind in _UNUSED.items():
        fields.optional(name, kind)
    layers, heads = fields["num_hidden_layers"], fields["num_attention_heads"]
    if (dense := fields.get("first_k_dense_replace", 3)) < layers:
        fields.refuse(
            f"first_k_dense_replace must be at least num_hidden_layers ({layers}), as our layers are dense; got {dense}"
        )
    if (keys := fields.get("num_key_value_heads", heads)) != heads:
        fields.refuse(f"num_key_value_heads must be num_attention_heads ({heads}); got {keys}")
    bias = fields.get("attention_bias", False)
    sizes = {name: fields.get(name, default) for name, default in _SIZES.items()}
    settings = read_llamas(fields)
    return {
        **settings,
        "rope": {**_with_mscale(settings["rope"], fields), "interleaved": fields.get("rope_interleave", True)},
        "attention": {"qkv_bias": bias, "output_bias": bias},
        "mla": {**sizes, "q_lora_rank": fields.get_or_null("q_lora_rank", 1536), "norm_epsilon": _EPSILON},
    }


def _with_mscale(rope: dict[str, Any], fields: Fields) -> dict[str, Any]:
    """``rope``; refuses an mscale_all_dim that is not in it, which their attention reads all the same."""
    given = [fields.optional(name, dict) or {} for name in ("rope_scaling", "rope_parameters")]
    if any(one.get("mscale_all_dim") for one in given) and "mscale_all_dim" not in (rope["scaling"] or {}):
        fields.refuse("mscale_all_dim of rope_scaling must come with mscale, and without attention_factor")
    return rope


def _write_rest(config: TransformerConfig, max_position_embeddings: int) -> Mapping[str, Any]:
    assert config.mla is not None, "a DeepSeek-V3 has latents"
    assert config.rope is not None, "and rotary positions"
    return {
        **write_llamas(config, max_position_embeddings),
        **{name: getattr(config.mla, name) for name in (*_SIZES, "q_lora_rank")},
        "num_key_value_heads": config.num_attention_heads,
        "rope_interleave": config.rope.interleaved,
        "attention_bias": config.qkv_bias,
        "first_k_dense_replace": config.num_layers,
        "num_nextn_predict_layers": 0,
    }


def _allowed(config: TransformerConfig) -> Mapping[str, tuple[Any, ...]]:
    of_latents: dict[str, tuple[Any, ...]] = {"mla.kv_lora_rank": ("a size",)}
    if config.mla is not None:
        of_latents = left_open(config, *(f"mla.{name}" for name in MLAConfig.model_fields))
        of_latents["mla.norm_epsilon"] = (_EPSILON, None) if config.layernorm_epsilon == _EPSILON else (_EPSILON,)
    return {
        **allowed_of_llamas(config),
        **left_open(config, "rope.interleaved"),
        **of_latents,
        "add_bias_linear": (False,),
        "mlp_bias": (False,),
        "output_bias": (config.qkv_bias,),
    }


DEEPSEEK_V3 = replace(
    LLAMA,
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    fields={name: field for name, field in LLAMA.fields.items() if name not in ("num_key_value_heads", "head_dim")},
    read_rest=_read_rest,
    write_rest=_write_rest,
    allowed=_allowed,
)
