"""Hugging Face's ``Qwen2ForCausalLM`` and ``Qwen3ForCausalLM``: Llamas with QKV biases, or with QK norms.

Yang et al. 2024, "Qwen2", arXiv:2407.10671; Yang et al. 2025, "Qwen3", arXiv:2505.09388, section 2.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megalith.config import TransformerConfig
from megalith.models.hf.fields import Fields
from megalith.models.hf.layer_types import read_layer_types, write_layer_types
from megalith.models.hf.llama import LLAMA, allowed_of_llamas, read_llamas, write_llamas
from megalith.models.hf.parameters import left_open

__all__ = ["QWEN2", "QWEN3"]

_WINDOW = 4096  # [tokens] the default of both classes


def _read_windows(fields: Fields) -> dict[str, Any]:
    fields.expect("use_mrope", False)  # for their vision models
    window = fields.get_or_null("sliding_window", _WINDOW)
    first = fields.get("max_window_layers", 28)
    if not fields.get("use_sliding_window", False):
        window = None
    return read_layer_types(fields, window, lambda index: window is not None and index >= first)


def _write_windows(config: TransformerConfig) -> dict[str, Any]:
    window = config.attention.window
    windowed = [index for index in range(config.num_layers) if config.attention.window_of(index) is not None]
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        # transformers before 4.53 reads this instead of layer_types
        "max_window_layers": min(windowed, default=config.num_layers),
        "layer_types": write_layer_types(config),
    }


def _read_qwen2(fields: Fields) -> Mapping[str, Any]:
    return {**read_llamas(fields), "attention": {**_read_windows(fields), "qkv_bias": True}}


def _read_qwen3(fields: Fields) -> Mapping[str, Any]:
    bias = fields.get("attention_bias", False)
    attention = {**_read_windows(fields), "qk_norm": "RMSNorm", "qkv_bias": bias, "output_bias": bias}
    return {**read_llamas(fields), "attention": attention}


def _write_qwen2(config: TransformerConfig, max_position_embeddings: int) -> Mapping[str, Any]:
    return {**write_llamas(config, max_position_embeddings), **_write_windows(config)}


def _write_qwen3(config: TransformerConfig, max_position_embeddings: int) -> Mapping[str, Any]:
    return {**_write_qwen2(config, max_position_embeddings), "attention_bias": config.qkv_bias}


def _allowed_of_qwen2(config: TransformerConfig) -> Mapping[str, tuple[Any, ...]]:
    return {
        **allowed_of_llamas(config),
        **left_open(config, "attention.window", "attention.window_layers"),
        "add_bias_linear": (False,),
        "mlp_bias": (False,),
        "qkv_bias": (True,),
        "output_bias": (False,),
        "kv_channels": (config.hidden_size / config.num_attention_heads,),
    }


def _allowed_of_qwen3(config: TransformerConfig) -> Mapping[str, tuple[Any, ...]]:
    return {
        **allowed_of_llamas(config),
        **left_open(config, "attention.window", "attention.window_layers"),
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
