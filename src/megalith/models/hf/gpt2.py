"""Hugging Face's ``GPT2LMHeadModel``.

Its linear layers are ``Conv1D``: weights are [in, out], the transpose of ours, and query, key and value are the thirds
of one ``c_attn`` [H, 3H]. H hidden.
"""

import re
from collections.abc import Mapping
from typing import Any

from megalith.config import TransformerConfig
from megalith.models.hf.family import HEAD, Family
from megalith.models.hf.fields import Fields
from megalith.models.hf.parameters import left_open
from megalith.models.hf.places import Place

__all__ = ["GPT2"]

_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}

# our module -> theirs
_OUTSIDE = {"model.embed_tokens": "wte", "model.embed_positions": "wpe", "model.norm": "ln_f"}
_NORMS = {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2"}
_LINEARS = {
    "self_attn.q_proj": "attn.c_attn",
    "self_attn.k_proj": "attn.c_attn",
    "self_attn.v_proj": "attn.c_attn",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}


def _read_rest(fields: Fields) -> Mapping[str, Any]:
    activation = fields.get("activation_function", "gelu_new")
    if activation not in _ACTIVATIONS:
        fields.refuse(f"activation_function must be one of {', '.join(_ACTIVATIONS)}; got {activation!r}")
    fields.expect("scale_attn_weights", True)
    fields.expect("scale_attn_by_inverse_layer_idx", False)
    fields.expect("add_cross_attention", False)
    return {
        "normalization": "LayerNorm",
        "activation": _ACTIVATIONS.get(activation),
        "add_bias_linear": True,
        "position_embedding_type": "learned_absolute",
        "hidden_dropout": fields.get("resid_pdrop", 0.1),
        "residual": {"embedding_dropout": fields.get("embd_pdrop", 0.1)},
    }


def _write_rest(config: TransformerConfig, max_position_embeddings: int) -> Mapping[str, Any]:
    return {
        "activation_function": {"gelu_tanh": "gelu_new"}.get(config.activation, config.activation),
        "resid_pdrop": config.hidden_dropout,
        "embd_pdrop": config.embedding_dropout,
    }


def _allowed(config: TransformerConfig) -> Mapping[str, tuple[Any, ...]]:
    return {
        "normalization": ("LayerNorm",),
        "position_embedding_type": ("learned_absolute",),
        "activation": ("gelu_tanh", "gelu", "relu"),
        "add_bias_linear": (True,),
        "qkv_bias": (True,),
        "output_bias": (True,),
        "mlp_bias": (True,),
        "num_query_groups": (config.num_attention_heads,),
        "kv_channels": (config.hidden_size / config.num_attention_heads,),
        **left_open(
            config, "attention.qkv_bias", "attention.output_bias", "residual.embedding_dropout", "residual.fp32"
        ),
    }


def _place(name: str) -> Place:
    module, part = name.rsplit(".", 1)
    if name == HEAD:
        return Place(name)
    if module in _OUTSIDE:
        return Place(f"transformer.{_OUTSIDE[module]}.{part}")
    _, _, layer, module = module.split(".", 3)  # model.layers.<layer>.<module>
    theirs = _NORMS.get(module) or _LINEARS[module]
    transposed = module in _LINEARS and part == "weight"
    return Place(f"transformer.h.{layer}.{theirs}.{part}", (1, 0) if transposed else ())


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    sizes={
        "vocab_size": "vocab_size",
        "n_positions": "max_position_embeddings",
        "n_embd": "hidden_size",
        "n_layer": "num_layers",
        "n_head": "num_attention_heads",
    },
    fields={
        "n_inner": ("ffn_hidden_size", int),
        "layer_norm_epsilon": ("layernorm_epsilon", 1e-5),
        "tie_word_embeddings": ("tie_word_embeddings", True),
        "attn_pdrop": ("attention_dropout", 0.1),
        "initializer_range": ("init_method_std", 0.02),
    },
    read_rest=_read_rest,
    write_rest=_write_rest,
    allowed=_allowed,
    place=_place,
    # the causal mask and its fill value, in files of transformers before 4.30
    buffers=re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)"),
    prefix="transformer.",  # GPT-2's published files were saved from the base model
)
