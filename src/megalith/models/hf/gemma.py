"""Hugging Face's ``Gemma2ForCausalLM`` and ``Gemma3ForCausalLM`` (text).

Gemma Team 2024, "Gemma 2", arXiv:2408.00118; Gemma Team 2025, "Gemma 3", arXiv:2503.19786.

transformers rounds the embedding multiplier sqrt(H) to the dtype of the weights, and Megalith does not: in bfloat16 the
two differ by up to 0.4 %, and not at all if bfloat16 represents sqrt(H) exactly. H hidden.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from megalith.config import TransformerConfig
from megalith.config.draft import round_up
from megalith.config.settings_group import LARGEST_SIZE
from megalith.models.hf.fields import Fields
from megalith.models.hf.layer_types import read_layer_types, write_layer_types
from megalith.models.hf.llama import LLAMA
from megalith.models.hf.parameters import left_open
from megalith.models.hf.places import Place
from megalith.models.hf.rope_parameters import read_rope, read_rope_by_layer, write_rope, write_rope_by_layer

__all__ = ["GEMMA2", "GEMMA3"]

_ACTIVATION = "gelu_pytorch_tanh"
_WINDOW = 4096  # [tokens] the default of both classes
# our layer norms -> theirs; their post norms apply to outputs
_NORMS: Mapping[str, str] = MappingProxyType(
    {
        "self_attn_output_layernorm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "mlp_output_layernorm": "post_feedforward_layernorm",
    }
)


def _read_rest(
    fields: Fields, rope: dict[str, Any], attention: dict[str, Any], logit_softcap: float | None
) -> dict[str, Any]:
    """Returns the settings that both models share, and those in the arguments, which differ."""
    if (activation := fields.get("hidden_activation", _ACTIVATION)) != _ACTIVATION:
        fields.refuse(f"hidden_activation must be {_ACTIVATION!r}, which geglu_tanh is built from; got {activation!r}")
    fields.optional("hidden_act", str)  # in old files along with hidden_activation, unused
    fields.optional("cache_implementation", str)  # only for generation
    fields.expect("use_bidirectional_attention", False)
    bias = fields.get("attention_bias", False)
    return {
        "normalization": "RMSNorm",
        "activation": "geglu_tanh",
        "position_embedding_type": "rope",
        "rope": rope,
        "residual": {"norm_placement": "sandwich", "zero_centered_norm": True},
        "multipliers": {"embedding": _root(fields, "hidden_size", 1), "logit_softcap": logit_softcap},
        "attention": {
            **attention,
            "scale": 1.0 / _root(fields, "query_pre_attn_scalar", 256),
            "qkv_bias": bias,
            "output_bias": bias,
        },
    }


def _root(fields: Fields, name: str, default: int) -> float:
    """Returns the square root of the size field ``name``."""
    size = fields.get(name, default)
    if 1 <= size <= LARGEST_SIZE:
        return math.sqrt(size)
    fields.refuse(f"{name} must be a number from 1 to {LARGEST_SIZE}; got {size!r:.80}")
    return 1.0


def _read_gemma2(fields: Fields) -> Mapping[str, Any]:
    window = fields.get_or_null("sliding_window", _WINDOW)
    if (other := fields.optional("sliding_window_size", int)) not in (None, window):  # in the 9B's file as well
        fields.refuse(f"sliding_window_size must equal sliding_window ({window}), which is the one used; got {other}")
    attention = {
        **read_layer_types(fields, window, lambda index: index % 2 == 0),
        "logit_softcap": fields.get_or_null("attn_logit_softcapping", 50.0),
    }
    return _read_rest(fields, read_rope(fields), attention, fields.get_or_null("final_logit_softcapping", 30.0))


def _read_gemma3(fields: Fields) -> Mapping[str, Any]:
    fields.optional("_sliding_window_pattern", int)  # transformers 5 writes it, but never reads it
    if (pattern := fields.get("sliding_window_pattern", 6)) < 1:
        fields.refuse(f"sliding_window_pattern must be at least 1; got {pattern!r:.80}")
        pattern = 1
    window = fields.get_or_null("sliding_window", _WINDOW)
    windows = read_layer_types(fields, window, lambda index: (index + 1) % pattern != 0)
    if (softcap := fields.optional("attn_logit_softcapping", float)) is not None:
        fields.refuse(f"attn_logit_softcapping must be null: Gemma 3's attention does not apply it; got {softcap}")
    rope = read_rope_by_layer(fields, base=1e6, local_base=1e4)
    if not windows:
        del rope["local_base"]
    attention = {**windows, "qk_norm": "RMSNorm"}
    return _read_rest(fields, rope, attention, fields.optional("final_logit_softcapping", float))


def _write_rest(config: TransformerConfig) -> dict[str, Any]:
    return {
        "hidden_activation": _ACTIVATION,
        "attention_bias": config.qkv_bias,
        "query_pre_attn_scalar": _query_pre_attn_scalar(config),
        # transformers builds the sliding-window mask even if no layer has a window
        "sliding_window": config.attention.window or _WINDOW,
        "layer_types": write_layer_types(config),
        "final_logit_softcapping": config.multipliers.logit_softcap,
        "attn_logit_softcapping": config.attention.logit_softcap,
        # the default is token 0, whose embedding transformers would then not train
        "pad_token_id": None,
    }


def _write_gemma2(config: TransformerConfig, max_position_embeddings: int) -> Mapping[str, Any]:
    assert config.rope is not None, "Gemma has rotary positions"
    return {**_write_rest(config), **write_rope(config.rope, max_position_embeddings)}


def _write_gemma3(config: TransformerConfig, max_position_embeddings: int) -> Mapping[str, Any]:
    assert config.rope is not None, "Gemma has rotary positions"
    return {**_write_rest(config), **write_rope_by_layer(config.rope, max_position_embeddings)}


def _query_pre_attn_scalar(config: TransformerConfig) -> int:
    """Returns the integer whose square root divides the attention scores, or the nearest one."""
    scale = config.attention.scale
    return config.kv_channels if scale is None else max(round(min(1.0 / scale / scale, LARGEST_SIZE)), 1)


def _allowed(config: TransformerConfig) -> dict[str, tuple[Any, ...]]:
    return {
        "normalization": ("RMSNorm",),
        "position_embedding_type": ("rope",),
        "activation": ("geglu_tanh",),
        "hidden_dropout": (0.0,),
        "embedding_dropout": (0.0,),
        "add_bias_linear": (False,),
        "mlp_bias": (False,),
        "output_bias": (config.qkv_bias,),
        # their classes require a multiple of the number of heads, whatever the head size
        "hidden_size": (round_up(config.hidden_size, config.num_attention_heads),),
        "residual.norm_placement": ("sandwich",),
        "residual.zero_centered_norm": (True,),
        "multipliers.embedding": (math.sqrt(config.hidden_size),),
        "attention.scale": (None, 1.0 / math.sqrt(_query_pre_attn_scalar(config))),
        **left_open(
            config,
            "rope.base",
            "attention.window",
            "attention.window_layers",
            "attention.qkv_bias",
            "attention.output_bias",
            "multipliers.logit_softcap",
            "residual.embedding_dropout",
            "residual.fp32",
        ),
    }


def _allowed_of_gemma2(config: TransformerConfig) -> Mapping[str, tuple[Any, ...]]:
    return {**_allowed(config), **left_open(config, "rope.scaling", "attention.logit_softcap")}


def _allowed_of_gemma3(config: TransformerConfig) -> Mapping[str, tuple[Any, ...]]:
    has_own_base = config.attention.window is None or (config.rope is not None and config.rope.local_base is not None)
    # rotary scaling never applies to layers with a window
    opened = ("rope.local_base", "rope.scaling") if has_own_base else ("rope.local_base",)
    return {**_allowed(config), **left_open(config, *opened), "attention.qk_norm": ("RMSNorm",)}


def _place(name: str) -> Place:
    *outer, module, part = name.split(".")
    return Place(".".join((*outer, _NORMS.get(module, module), part)))


GEMMA2 = replace(
    LLAMA,
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    fields={
        **LLAMA.fields,
        "num_key_value_heads": ("num_query_groups", 4),
        "head_dim": ("kv_channels", 256),
        "tie_word_embeddings": ("tie_word_embeddings", True),
    },
    read_rest=_read_gemma2,
    write_rest=_write_gemma2,
    allowed=_allowed_of_gemma2,
    place=_place,
)
GEMMA3 = replace(
    GEMMA2,
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    read_rest=_read_gemma3,
    write_rest=_write_gemma3,
    allowed=_allowed_of_gemma3,
)
