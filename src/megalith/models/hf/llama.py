"""Hugging Face's ``LlamaForCausalLM``, whose names of parameters are ours."""

import re
from collections.abc import Mapping
from typing import Any

from megalith.config import TransformerConfig
from megalith.config.draft import round_up
from megalith.models.hf.family import Family, Place
from megalith.models.hf.fields import Fields

__all__ = ["LLAMA"]


def _read_rest(fields: Fields) -> Mapping[str, Any]:
    activation = fields.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        fields.refuse(f"hidden_act must be 'silu', half of our swiglu; got {activation!r}")
    attention_bias, mlp_bias = fields.get("attention_bias", False), fields.get("mlp_bias", False)
    if attention_bias != mlp_bias:
        fields.refuse(
            f"attention_bias ({attention_bias}) and mlp_bias ({mlp_bias}) must be equal: "
            f"our add_bias_linear sets both at once"
        )
    fields.optional("max_position_embeddings", int)  # rotary positions have no table, so no bound
    return {
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "add_bias_linear": attention_bias,
        "position_embedding_type": "rope",
        "rope": {"base": _rotary_base(fields)},
    }


def _write_rest(config: TransformerConfig, max_position_embeddings: int) -> Mapping[str, Any]:
    assert config.rope is not None, "a Llama has rotary positions"
    return {
        "hidden_act": "silu",
        "attention_bias": config.add_bias_linear,
        "mlp_bias": config.add_bias_linear,
        "max_position_embeddings": max_position_embeddings,
        "rope_theta": config.rope.base,  # transformers 4 reads this, transformers 5 the next
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.base},
    }


def _allowed(config: TransformerConfig) -> Mapping[str, tuple[Any, ...]]:
    return {
        "normalization": ("RMSNorm",),
        "position_embedding_type": ("rope",),
        "activation": ("swiglu",),
        "hidden_dropout": (0.0,),
        "mtp": (None,),
        # LlamaConfig refuses others, whatever the size of a head
        "hidden_size": (round_up(config.hidden_size, config.num_attention_heads),),
    }


def _rotary_base(fields: Fields) -> float:
    """The base, from ``rope_theta`` (transformers 4) or ``rope_parameters`` (transformers 5)."""
    bases: dict[str, float] = {}
    if (base := fields.optional("rope_theta", float)) is not None:
        bases["rope_theta"] = base
    for name in ("rope_scaling", "rope_parameters"):  # one thing, under its old and its new name
        rope = dict[str, Any](fields.optional(name, dict) or {})
        kind = rope.pop("rope_type", rope.pop("type", "default"))
        base = rope.pop("rope_theta", None)
        if isinstance(base, int | float):
            bases[f"{name}.rope_theta"] = base
        elif base is not None:
            fields.refuse(f"{name}.rope_theta must be a number; got {base!r:.80}")
        if kind != "default" or rope:
            fields.refuse(
                f"{name} must be absent, or of rope_type 'default' with nothing but a rope_theta: our rotary positions "
                f"are not scaled; got rope_type {kind!r:.80} with {sorted(rope)}"
            )
    if len(set(bases.values())) > 1:
        fields.refuse(f"the bases of the rotary positions differ: {bases}; delete the wrong one")
    base = next(iter(bases.values()), 10000.0)
    if abs(base) >= 2**63:
        fields.refuse("rope_theta must be below 2^63")
        base = 10000.0
    return float(base)


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
    # files of transformers before 4.32 carry it; it is a function of rope_theta
    buffers=re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
)
