"""Hugging Face's ``GPT2LMHeadModel``: its config.json, and its tensors.

Its linear layers are ``Conv1D``: weights are [in, out], the transpose of ours, and query, key and value are the thirds
of one ``c_attn`` [H, 3H]. H hidden.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from megalith.config import TransformerConfig
from megalith.models.hf.fields import Fields
from megalith.models.hf.parameters import check, drop_tied_head, parameter_shapes, require

__all__ = ["config_from_hf", "config_to_hf", "from_hf", "to_hf"]

_EMBEDDING = "transformer.wte.weight"
_HEAD = "lm_head.weight"
# the causal mask and its fill value, in files of transformers before 4.30
_BUFFER = re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)")
_REQUIRED = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}

# our module -> theirs
_OUTSIDE = {"model.embed_tokens": "wte", "model.embed_positions": "wpe", "model.norm": "ln_f"}
_IN_LAYER = {
    "input_layernorm": "ln_1",
    "self_attn.q_proj": "attn.c_attn",
    "self_attn.k_proj": "attn.c_attn",
    "self_attn.v_proj": "attn.c_attn",
    "self_attn.o_proj": "attn.c_proj",
    "post_attention_layernorm": "ln_2",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
_CONV1D = re.compile(r".*\.(attn|mlp)\.\w+\.weight")
_THIRD = {"q_proj": 0, "k_proj": 1, "v_proj": 2}


def config_from_hf(hf_config: Mapping[str, Any]) -> TransformerConfig:
    """The model that a GPT-2 config.json describes; absent fields have the defaults of ``GPT2Config``.

    Raises ConfigError naming every field that our model cannot represent, and every field that it does not know.
    """
    fields = Fields(hf_config, "gpt2", _REQUIRED)
    activation = fields.get("activation_function", "gelu_new")
    if activation not in _ACTIVATIONS:
        fields.refuse(f"activation_function must be one of {', '.join(_ACTIVATIONS)}; got {activation!r}")
    dropout, embedding_dropout = fields.get("resid_pdrop", 0.1), fields.get("embd_pdrop", 0.1)
    if dropout != embedding_dropout:
        fields.refuse(
            f"resid_pdrop ({dropout}) and embd_pdrop ({embedding_dropout}) must be equal: "
            f"our hidden_dropout is one for both"
        )
    fields.expect("scale_attn_weights", True)
    fields.expect("scale_attn_by_inverse_layer_idx", False)
    fields.expect("add_cross_attention", False)
    hidden_size = fields["n_embd"]
    return fields.build(
        vocab_size=fields["vocab_size"],
        num_layers=fields["n_layer"],
        hidden_size=hidden_size,
        ffn_hidden_size=fields.get("n_inner", 4 * hidden_size),
        num_attention_heads=fields["n_head"],
        max_position_embeddings=fields["n_positions"],
        normalization="LayerNorm",
        layernorm_epsilon=fields.get("layer_norm_epsilon", 1e-5),
        position_embedding_type="learned_absolute",
        activation=_ACTIVATIONS.get(activation),
        add_bias_linear=True,
        tie_word_embeddings=fields.get("tie_word_embeddings", True),
        hidden_dropout=dropout,
        attention_dropout=fields.get("attn_pdrop", 0.1),
        init_method_std=fields.get("initializer_range", 0.02),
    )


def config_to_hf(config: TransformerConfig, *, dtype: str, eos_token_id: int | None) -> dict[str, Any]:
    """The config.json of ``config``; ``dtype`` is that of the tensors beside it (as ``"bfloat16"``).

    Raises ConfigError if ``config`` is no GPT-2.
    """
    _require_gpt2(config)
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.max_position_embeddings,
        "n_embd": config.hidden_size,
        "n_layer": config.num_layers,
        "n_head": config.num_attention_heads,
        "n_inner": config.ffn_hidden_size,
        "activation_function": "gelu" if config.activation == "gelu" else "gelu_new",
        "resid_pdrop": config.hidden_dropout,
        "embd_pdrop": config.hidden_dropout,
        "attn_pdrop": config.attention_dropout,
        "layer_norm_epsilon": config.layernorm_epsilon,
        "initializer_range": config.init_method_std,
        "tie_word_embeddings": config.tie_word_embeddings,
        # their default, 50256, is a token of GPT-2's own vocabulary
        "bos_token_id": eos_token_id,
        "eos_token_id": eos_token_id,
        "torch_dtype": dtype,
    }


def from_hf(state: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """Our state dict of the tensors of a ``GPT2LMHeadModel``, with or without the prefix ``transformer.``.

    Raises CheckpointError listing every tensor that is missing, unknown or of another shape.
    """
    _require_gpt2(config)
    shapes = parameter_shapes(config)
    on_meta = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    want = {name: tuple(tensor.shape) for name, tensor in _packed(on_meta, shapes).items()}
    theirs = {name: tensor for name, tensor in _prefixed(state).items() if not _BUFFER.fullmatch(name)}
    if config.tie_word_embeddings:
        theirs = drop_tied_head(theirs, _EMBEDDING)
    check(theirs, want, "GPT2LMHeadModel")
    return {name: _unpacked(theirs[_theirs(name)], name) for name in shapes}


def to_hf(state: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """The state dict of the ``GPT2LMHeadModel`` that our ``state`` is.

    A tied head is the embedding a second time, as ``load_state_dict`` wants it and a safetensors file does not.
    Raises CheckpointError listing every tensor that is missing, unknown or of another shape.
    """
    _require_gpt2(config)
    shapes = parameter_shapes(config)
    check(state, shapes, "the model")
    theirs = _packed(state, shapes)
    return theirs | {_HEAD: theirs[_EMBEDDING]} if config.tie_word_embeddings else theirs


def _theirs(name: str) -> str:
    """Their name of the tensor that holds our ``name``, alone or as a third."""
    module, part = name.rsplit(".", 1)
    if name == _HEAD:
        return name
    if module in _OUTSIDE:
        return f"transformer.{_OUTSIDE[module]}.{part}"
    _, _, layer, module = module.split(".", 3)  # model.layers.<layer>.<module>
    return f"transformer.h.{layer}.{_IN_LAYER[module]}.{part}"


def _packed(state: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Their tensors, made of ours; ``names`` has query, key and value in this order."""
    parts: dict[str, list[Tensor]] = {}
    for name in names:
        parts.setdefault(_theirs(name), []).append(state[name])
    whole = {name: torch.cat(tensors) if len(tensors) > 1 else tensors[0] for name, tensors in parts.items()}
    return {name: tensor.t().contiguous() if _CONV1D.fullmatch(name) else tensor for name, tensor in whole.items()}


def _unpacked(tensor: Tensor, name: str) -> Tensor:
    """Our tensor ``name`` out of theirs; a copy where it is a transpose or a third, so that no two share memory."""
    third = _THIRD.get(name.split(".")[-2])
    if transposed := _CONV1D.fullmatch(_theirs(name)):
        tensor = tensor.t()  # [out, in]
    if third is not None:
        tensor = tensor.chunk(3)[third]
    return tensor.clone(memory_format=torch.contiguous_format) if transposed or third is not None else tensor


def _prefixed(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """``state`` under the names of the model with a head; GPT-2's own files were written from the model without."""
    if any(name.startswith("transformer.") for name in state):
        return state
    return {name if name == _HEAD else f"transformer.{name}": tensor for name, tensor in state.items()}


def _require_gpt2(config: TransformerConfig) -> None:
    require(
        "GPT2LMHeadModel",
        config,
        normalization=("LayerNorm",),
        position_embedding_type=("learned_absolute",),
        activation=("gelu_tanh", "gelu"),
        add_bias_linear=(True,),
        num_query_groups=(config.num_attention_heads,),
        kv_channels=(config.hidden_size / config.num_attention_heads,),
    )
