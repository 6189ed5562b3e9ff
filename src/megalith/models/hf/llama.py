"""Hugging Face's ``LlamaForCausalLM``, whose parameter names Megalith uses."""

import re
from collections.abc import Mapping
from typing import Any

from megalith.config import TransformerConfig
from megalith.config.draft import round_up
from megalith.models.hf.family import Family
from megalith.models.hf.fields import Fields
from megalith.models.hf.parameters import left_open
from megalith.models.hf.places import Place
from megalith.models.hf.rope_parameters import read_rope, write_rope

__all__ = ["LLAMA", "allowed_of_llamas", "read_llamas", "write_llamas"]


def read_llamas(fields: Fields, rope_base: float = 10000.0) -> dict[str, Any]:
    """Returns the settings that Llama and its successors share; some have another default ``rope_base``."""
    activation = fields.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        fields.refuse(f"hidden_act must be 'silu', which swiglu is built from; got {activation!r}")
    return {
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "position_embedding_type": "rope",
        "rope": read_rope(fields, rope_base),
    }


def write_llamas(config: TransformerConfig, max_position_embeddings: int) -> dict[str, Any]:
    """The inverse of ``read_llamas``."""
    assert config.rope is not None, "Llama has rotary positions"
    return {"hidden_act": "silu", **write_rope(config.rope, max_position_embeddings)}


def allowed_of_llamas(config: TransformerConfig) -> dict[str, tuple[Any, ...]]:
    """Returns the values that ``write_llamas`` and the tables of fields can represent."""
    opened = ("rope.base", "rope.scaling", "attention.qkv_bias", "attention.output_bias")
    return {
        "normalization": ("RMSNorm",),
        "position_embedding_type": ("rope",),
        "activation": ("swiglu",),
        "hidden_dropout": (0.0,),
        "embedding_dropout": (0.0,),
        **left_open(config, *opened, "residual.embedding_dropout", "residual.fp32"),
    }


def _read_rest(fields: Fields) -> Mapping[str, Any]:
    fields.expect("rope_interleaved", False)  # in SmolLM2's files, not in any class
    return {
        **read_llamas(fields),
        "add_bias_linear": fields.get("attention_bias", False),
        "mlp_bias": fields.get("mlp_bias", False),
    }


def _write_rest(config: TransformerConfig, max_position_embeddings: int) -> Mapping[str, Any]:
    biases = {"attention_bias": config.add_bias_linear, "mlp_bias": config.mlp_bias}
    return {**write_llamas(config, max_position_embeddings), **biases}


def _allowed(config: TransformerConfig) -> Mapping[str, tuple[Any, ...]]:
    return {
        **allowed_of_llamas(config),
        "qkv_bias": (config.add_bias_linear,),
        "output_bias": (config.add_bias_linear,),
        # LlamaConfig requires a multiple of the number of heads, whatever the head size
        "hidden_size": (round_up(config.hidden_size, config.num_attention_heads),),
    }


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    sizes={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "ffn_hidden_size",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_attention_heads",
    },
    fields={
        "num_key_value_heads": ("num_query_groups", int),
        "head_dim": ("kv_channels", int),
        "rms_norm_eps": ("layernorm_epsilon", 1e-6),
        "tie_word_embeddings": ("tie_word_embeddings", False),
        "attention_dropout": ("attention_dropout", 0.0),
        "initializer_range": ("init_method_std", 0.02),
    },
    read_rest=_read_rest,
    write_rest=_write_rest,
    allowed=_allowed,
    place=Place,
    # in files of transformers before 4.32; follows from rope_theta
    buffers=re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
)
