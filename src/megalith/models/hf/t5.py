"""Hugging Face's ``T5ForConditionalGeneration``: T5 with a plain MLP, T5 v1.1 and FLAN-T5 with a gated MLP.

In their configs, ``tie_word_embeddings`` also says whether the head's input is scaled by 1 / sqrt(H); in v1.1, which
has a separate head, it is not. Since version 5, transformers stores that in ``scale_decoder_outputs``, and ties a head
that is missing from the files, whatever the field says.

The relative position tables are stored in the first layer of each stack. Attention scores are not scaled.
"""

import re
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from megalith.config import TransformerConfig
from megalith.config.activations import Activation
from megalith.models.hf.family import HEAD, Family
from megalith.models.hf.fields import Fields
from megalith.models.hf.parameters import left_open
from megalith.models.hf.places import Place

__all__ = ["FLAN_T5", "T5", "T5_FAMILIES"]

_PLAIN: Mapping[str, Activation] = MappingProxyType({"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh"})
# their "gated-gelu" is the tanh approximation
_GATED: Mapping[str, Activation] = MappingProxyType(
    {"gated-gelu": "geglu_tanh", "gated-gelu_new": "geglu_tanh", "gated-silu": "swiglu"}
)

_SIZES: Mapping[str, str] = MappingProxyType(
    {
        "vocab_size": "vocab_size",
        "num_layers": "num_layers",
        "d_model": "hidden_size",
        "num_heads": "num_attention_heads",
        "d_kv": "kv_channels",
        "d_ff": "ffn_hidden_size",
    }
)
_FIELDS: Mapping[str, tuple[str, Any]] = MappingProxyType(
    {"layer_norm_epsilon": ("layernorm_epsilon", 1e-6), "dropout_rate": ("hidden_dropout", 0.1)}
)
# initialization, other heads and old files: no effect on the network
_UNUSED: Mapping[str, type] = MappingProxyType(
    {"initializer_factor": float, "classifier_dropout": float, "n_positions": int, "output_past": bool}
)

# our module -> theirs
_OUTSIDE = {
    "model.embed_tokens": "shared",
    "lm_head": "lm_head",
    **{f"model.{stack}.norm": f"{stack}.final_layer_norm" for stack in ("encoder", "decoder")},
    **{
        f"model.{stack}.position_bias": f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"
        for stack in ("encoder", "decoder")
    },
}
_PROJECTIONS = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o"}
# modules of every layer; the MLP's sublayer number depends on the stack
_OF_LAYERS = {
    "input_layernorm": "layer.0.layer_norm",
    **{f"self_attn.{ours}": f"layer.0.SelfAttention.{theirs}" for ours, theirs in _PROJECTIONS.items()},
    "cross_attn_layernorm": "layer.1.layer_norm",
    **{f"cross_attn.{ours}": f"layer.1.EncDecAttention.{theirs}" for ours, theirs in _PROJECTIONS.items()},
}
_MLP_PART = {"encoder": 1, "decoder": 2}


def _read_rest(fields: Fields, activations: Mapping[str, Activation]) -> dict[str, Any]:
    named = fields.get("feed_forward_proj", "relu")
    if named not in activations:
        fields.refuse(f"feed_forward_proj must be one of {', '.join((*_PLAIN, *_GATED))}; got {named!r:.80}")
    _check_activation(fields, named)
    fields.expect("is_encoder_decoder", True)
    fields.expect("is_decoder", False)
    for name, kind in _UNUSED.items():
        fields.optional(name, kind)
    says_tied = fields.get("tie_word_embeddings", True)
    scaled = fields.get("scale_decoder_outputs", says_tied)
    has_no_head = HEAD not in fields.keys if fields.keys else says_tied
    return {
        "activation": activations.get(named),
        "normalization": "RMSNorm",
        "position_embedding_type": "relative",
        "relative_position": {
            "num_buckets": fields.get("relative_attention_num_buckets", 32),
            "max_distance": fields.get("relative_attention_max_distance", 128),
        },
        "attention": {"scale": 1.0},
        "attention_dropout": fields.get("dropout_rate", 0.1),
        "tie_word_embeddings": scaled or has_no_head,
        "multipliers": {"logits": fields["d_model"] ** -0.5 if scaled else None},
        "t5": {"num_decoder_layers": fields.get("num_decoder_layers", fields["num_layers"])},
    }


def _check_activation(fields: Fields, named: str) -> None:
    """Records a violation if fields that their class derives from ``feed_forward_proj`` contradict it."""
    gate, _, function = named.rpartition("-")
    worked_out = "gelu_new" if named == "gated-gelu" else function
    if (given := fields.get("dense_act_fn", worked_out)) != worked_out:
        fields.refuse(f"dense_act_fn must be {worked_out!r} if feed_forward_proj is {named!r:.80}; got {given!r:.80}")
    fields.expect("is_gated_act", bool(gate))


def _write_rest(config: TransformerConfig, max_position_embeddings: int) -> dict[str, Any]:
    """Returns the fields that ``_read_rest`` reads. Relative positions have no limit, so no length is written."""
    assert config.t5 is not None, "_allowed requires it"
    assert config.relative_position is not None, "validated together with model.t5"
    activations = {ours: theirs for theirs, ours in reversed([*_PLAIN.items(), *_GATED.items()])}
    return {
        "feed_forward_proj": activations[config.activation],
        "is_encoder_decoder": True,
        "num_decoder_layers": config.t5.num_decoder_layers,
        "relative_attention_num_buckets": config.relative_position.num_buckets,
        "relative_attention_max_distance": config.relative_position.max_distance,
        "tie_word_embeddings": _is_scaled(config),
    }


def _allowed(config: TransformerConfig, activations: Mapping[str, Activation]) -> dict[str, tuple[Any, ...]]:
    return {
        "normalization": ("RMSNorm",),
        "position_embedding_type": ("relative",),
        "activation": tuple(dict.fromkeys(activations.values())),
        "add_bias_linear": (False,),
        "qkv_bias": (False,),
        "output_bias": (False,),
        "mlp_bias": (False,),
        "attention_dropout": (config.hidden_dropout,),
        "residual.embedding_dropout": (None, config.hidden_dropout),
        "attention.scale": (1.0,),
        "multipliers.logits": (config.hidden_size**-0.5, 1.0),
        "tie_word_embeddings": (True,) if _is_scaled(config) else (True, False),
        **left_open(config, "attention.qkv_bias", "attention.output_bias", "t5.num_decoder_layers"),
        **left_open(config, "relative_position.num_buckets", "relative_position.max_distance", "residual.fp32"),
    }


def _is_scaled(config: TransformerConfig) -> bool:
    """Whether the head's input is multiplied by 1 / sqrt(H)."""
    return config.multipliers.logits != 1.0


def _place(name: str, up_proj: str) -> Place:
    module, part = name.rsplit(".", 1)
    if module in _OUTSIDE:
        return Place(f"{_OUTSIDE[module]}.{part}")
    _, stack, _, layer, module = module.split(".", 4)  # model.<stack>.layers.<layer>.<module>
    mlp = f"layer.{_MLP_PART[stack]}"
    of_mlp = {
        "post_attention_layernorm": f"{mlp}.layer_norm",
        "mlp.gate_proj": f"{mlp}.DenseReluDense.wi_0",
        "mlp.up_proj": f"{mlp}.DenseReluDense.{up_proj}",
        "mlp.down_proj": f"{mlp}.DenseReluDense.wo",
    }
    return Place(f"{stack}.block.{layer}.{(_OF_LAYERS | of_mlp)[module]}.{part}")


def _family(activations: Mapping[str, Activation], up_proj: str) -> Family:
    return Family(
        model_type="t5",
        architecture="T5ForConditionalGeneration",
        sizes=_SIZES,
        fields=_FIELDS,
        read_rest=partial(_read_rest, activations=activations),
        write_rest=_write_rest,
        allowed=partial(_allowed, activations=activations),
        place=partial(_place, up_proj=up_proj),
        # a table in old files that no layer uses
        buffers=re.compile(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"),
        aliases=MappingProxyType({f"{stack}.embed_tokens.weight": "shared.weight" for stack in ("encoder", "decoder")}),
        has_config=lambda hf_config: (
            str(hf_config.get("feed_forward_proj")).startswith("gated-") == (up_proj == "wi_1")
        ),
    )


T5 = _family(_PLAIN, up_proj="wi")
FLAN_T5 = _family(_GATED, up_proj="wi_1")
T5_FAMILIES = (T5, FLAN_T5)
