"""Hugging Face's ``LlamaForCausalLM``: its config.json, and its tensors, whose names are ours.

Only what is not a parameter differs: rotary buffers of old files, and the head that a tied state dict repeats.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megalith.config import TransformerConfig
from megalith.models.hf.fields import Fields
from megalith.models.hf.parameters import check, drop_tied_head, parameter_shapes, require

__all__ = ["config_from_hf", "config_to_hf", "from_hf", "to_hf"]

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
# files of transformers before 4.32 carry it; it is a function of rope_theta
_BUFFER = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def config_from_hf(hf_config: Mapping[str, Any]) -> TransformerConfig:
    """The model that a Llama config.json describes; absent fields have the defaults of ``LlamaConfig``.

    Raises ConfigError naming every field that our model cannot represent, and every field that it does not know.
    """
    fields = Fields(hf_config, "llama", _REQUIRED)
    if fields.get("hidden_act", "silu") not in ("silu", "swish"):
        fields.refuse(f"hidden_act must be 'silu', half of our swiglu; got {hf_config['hidden_act']!r}")
    attention_bias, mlp_bias = fields.get("attention_bias", False), fields.get("mlp_bias", False)
    if attention_bias != mlp_bias:
        fields.refuse(
            f"attention_bias ({attention_bias}) and mlp_bias ({mlp_bias}) must be equal: "
            f"our add_bias_linear sets both at once"
        )
    num_attention_heads = fields["num_attention_heads"]
    fields.optional("max_position_embeddings", int)  # rotary positions have no table, so no bound
    return fields.build(
        vocab_size=fields["vocab_size"],
        num_layers=fields["num_hidden_layers"],
        hidden_size=fields["hidden_size"],
        ffn_hidden_size=fields["intermediate_size"],
        num_attention_heads=num_attention_heads,
        num_query_groups=fields.get("num_key_value_heads", num_attention_heads),
        kv_channels=fields.optional("head_dim", int),
        normalization="RMSNorm",
        layernorm_epsilon=fields.get("rms_norm_eps", 1e-6),
        position_embedding_type="rope",
        rope={"base": _rotary_base(fields)},
        activation="swiglu",
        add_bias_linear=attention_bias,
        tie_word_embeddings=fields.get("tie_word_embeddings", False),
        attention_dropout=fields.get("attention_dropout", 0.0),
        init_method_std=fields.get("initializer_range", 0.02),
    )


def config_to_hf(
    config: TransformerConfig, *, max_position_embeddings: int, dtype: str, eos_token_id: int | None
) -> dict[str, Any]:
    """The config.json of ``config``, as transformers 4 and 5 read it.

    ``max_position_embeddings`` is the length in tokens that the model was trained on, ``dtype`` that of the tensors
    beside it (as ``"bfloat16"``). Raises ConfigError if ``config`` is no Llama.
    """
    _require_llama(config)
    assert config.rope is not None, "a Llama has rotary positions"
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_query_groups,
        "head_dim": config.kv_channels,
        "hidden_act": "silu",
        "max_position_embeddings": max_position_embeddings,
        "initializer_range": config.init_method_std,
        "rms_norm_eps": config.layernorm_epsilon,
        "rope_theta": config.rope.base,  # transformers 4 reads this, transformers 5 the next
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.base},
        "attention_bias": config.add_bias_linear,
        "mlp_bias": config.add_bias_linear,
        "attention_dropout": config.attention_dropout,
        "tie_word_embeddings": config.tie_word_embeddings,
        # their defaults, 1 and 2, are tokens of somebody else's vocabulary
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "torch_dtype": dtype,
    }


def from_hf(state: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """Our state dict of the tensors of a ``LlamaForCausalLM``, the same tensors.

    Raises CheckpointError listing every tensor that is missing, unknown or of another shape.
    """
    _require_llama(config)
    ours = {name: tensor for name, tensor in state.items() if not _BUFFER.fullmatch(name)}
    if config.tie_word_embeddings:
        ours = drop_tied_head(ours, _EMBEDDING)
    shapes = parameter_shapes(config)
    check(ours, shapes, "LlamaForCausalLM")
    return {name: ours[name] for name in shapes}


def to_hf(state: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """The state dict of the ``LlamaForCausalLM`` that our ``state`` is, the same tensors.

    A tied head is the embedding a second time, as ``load_state_dict`` wants it and a safetensors file does not.
    Raises CheckpointError listing every tensor that is missing, unknown or of another shape.
    """
    _require_llama(config)
    check(state, parameter_shapes(config), "the model")
    return {**state, _HEAD: state[_EMBEDDING]} if config.tie_word_embeddings else dict(state)


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


def _require_llama(config: TransformerConfig) -> None:
    require(
        "LlamaForCausalLM",
        config,
        normalization=("RMSNorm",),
        position_embedding_type=("rope",),
        activation=("swiglu",),
        hidden_dropout=(0.0,),
    )
