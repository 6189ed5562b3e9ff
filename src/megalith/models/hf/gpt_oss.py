"""Hugging Face's ``GptOssForCausalLM``: experts with biases and a clamped gate, and attention with sinks.

Agarwal et al. 2025, "gpt-oss-120b & gpt-oss-20b", arXiv:2508.10925. The published files hold experts in four bits and
cannot be read; files that transformers saves after loading with ``Mxfp4Config(dequantize=True)`` can.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from megalith.config import TransformerConfig
from megalith.models.hf.experts import allowed_of_experts
from megalith.models.hf.fields import Fields
from megalith.models.hf.layer_types import read_layer_types, write_layer_types
from megalith.models.hf.llama import LLAMA, allowed_of_llamas, read_llamas, write_llamas
from megalith.models.hf.parameters import left_open
from megalith.models.hf.places import Dims, Place

__all__ = ["GPT_OSS"]

_WINDOW, _LIMIT = 128, 7.0  # [tokens] and [value]: the defaults of their class
_ALPHA = 1.702  # of quick_geglu
_SCALING: Mapping[str, Any] = MappingProxyType(  # the default of their class
    {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
)
# theirs are [E, H, 2F], gate and up interleaved, and [E, F, H]
_DIMS: Mapping[str, Dims] = MappingProxyType(
    {"gate_up_proj": (0, 3, (2, 1)), "gate_up_proj_bias": (0, (2, 1)), "down_proj": (0, 2, 1)}
)


def _read_rest(fields: Fields) -> Mapping[str, Any]:
    if (alpha := fields.get("swiglu_alpha", _ALPHA)) != _ALPHA:
        fields.refuse(f"swiglu_alpha must be {_ALPHA}, the value that quick_geglu uses; got {alpha}")
    # in the published files along with num_experts_per_tok and rope_scaling, unused
    fields.optional("experts_per_token", int)
    fields.optional("initial_context_length", int)
    settings, bias = read_llamas(fields, rope_base=150_000.0), fields.get("attention_bias", True)
    if all(fields.optional(name, dict) is None for name in ("rope_scaling", "rope_parameters")):
        settings["rope"]["scaling"] = dict(_SCALING)
    windows = read_layer_types(fields, fields.get_or_null("sliding_window", _WINDOW), lambda index: index % 2 == 0)
    return {
        **settings,
        "activation": "quick_geglu",
        "glu": {"clamp": fields.get("swiglu_limit", _LIMIT), "offset": 1.0},
        "mlp_bias": True,
        "attention": {**windows, "softmax": "learnable", "qkv_bias": bias, "output_bias": bias},
        "moe": {
            "num_experts": fields.get("num_local_experts", 128),
            "top_k": fields.get("num_experts_per_tok", 4),
            "router": {"bias": True},
        },
    }


def _write_rest(config: TransformerConfig, max_position_embeddings: int) -> Mapping[str, Any]:
    assert config.moe is not None, "gpt-oss has experts"
    assert config.glu is not None, "gpt-oss has a clamped gate"
    return {
        **write_llamas(config, max_position_embeddings),
        "intermediate_size": config.expert_ffn_hidden_size,
        "num_local_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.top_k,
        "swiglu_alpha": _ALPHA,
        "swiglu_limit": config.glu.clamp,
        "attention_bias": config.qkv_bias,
        # transformers builds the sliding-window mask even if no layer has a window
        "sliding_window": config.attention.window or _WINDOW,
        "layer_types": write_layer_types(config),
    }


def _allowed(config: TransformerConfig) -> Mapping[str, tuple[Any, ...]]:
    clamp = None if config.glu is None else config.glu.clamp
    return {
        **allowed_of_llamas(config),
        **left_open(config, "attention.window", "attention.window_layers"),
        **allowed_of_experts(config),
        "activation": ("quick_geglu",),
        "glu.clamp": (clamp or _LIMIT,),
        "glu.offset": (1.0,),
        "mlp_bias": (True,),
        "output_bias": (config.qkv_bias,),
        "attention.softmax": ("learnable",),
        "moe.router.bias": (True,),
    }


def _place(name: str) -> Place:
    return Place(name.replace(".mlp.gate.", ".mlp.router."), _DIMS.get(name.rpartition(".")[2], ()))


GPT_OSS = replace(
    LLAMA,
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    fields={
        **LLAMA.fields,
        "num_key_value_heads": ("num_query_groups", 8),
        "head_dim": ("kv_channels", 64),
        "rms_norm_eps": ("layernorm_epsilon", 1e-5),
    },
    read_rest=_read_rest,
    write_rest=_write_rest,
    allowed=_allowed,
    place=_place,
    separate_experts=False,
)
