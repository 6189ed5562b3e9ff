"""GPT of Megatron-Core: converts its arguments to our settings, and locates our parameters in its tensors.

    ours                                   theirs
    model.embed_tokens                     embedding.word_embeddings
    model.embed_positions                  embedding.position_embeddings
    layers.i.input_layernorm               decoder.layers.self_attention.linear_qkv.layer_norm_...
    layers.i.self_attn.{q,k,v}_proj        decoder.layers.self_attention.linear_qkv, per group: A/G heads of q, k, v
    layers.i.self_attn.{q,k}_norm          decoder.layers.self_attention.{q,k}_layernorm
    layers.i.self_attn.o_proj              decoder.layers.self_attention.linear_proj
    layers.i.post_attention_layernorm      decoder.layers.mlp.linear_fc1.layer_norm_...
    layers.i.mlp.{gate,up}_proj            decoder.layers.mlp.linear_fc1, gate above up
    layers.i.mlp.down_proj                 decoder.layers.mlp.linear_fc2
    model.norm                             decoder.final_layernorm
    lm_head                                output_layer

Layers of the same kind are stored as one tensor, stacked along a new first dimension; otherwise a key contains the
index of its layer: ``decoder.layers.3.mlp...``.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from megalith.config import TransformerConfig
from megalith.config.layer_pattern import shortest_pattern
from megalith.errors import ConfigError
from megalith.models.hf.layer_types import MOST_LAYERS
from megalith.models.megatron.inert_pickle import shown

__all__ = ["Rows", "config_of", "key_in_layer", "source_of"]

_OUTSIDE = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.embed_positions.weight": "embedding.position_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "model.norm.bias": "decoder.final_layernorm.bias",
    "lm_head.weight": "output_layer.weight",
}
_QKV, _FC1 = "self_attention.linear_qkv", "mlp.linear_fc1"
_IN_LAYER = {
    "input_layernorm.weight": f"{_QKV}.layer_norm_weight",
    "input_layernorm.bias": f"{_QKV}.layer_norm_bias",
    "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
    "self_attn.q_norm.bias": "self_attention.q_layernorm.bias",
    "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
    "self_attn.k_norm.bias": "self_attention.k_layernorm.bias",
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "self_attn.o_proj.bias": "self_attention.linear_proj.bias",
    "post_attention_layernorm.weight": f"{_FC1}.layer_norm_weight",
    "post_attention_layernorm.bias": f"{_FC1}.layer_norm_bias",
    "mlp.down_proj.weight": "mlp.linear_fc2.weight",
    "mlp.down_proj.bias": "mlp.linear_fc2.bias",
}
_ZERO_CENTERED = ("apply_layernorm_1p", "layernorm_zero_centered_gamma")  # the argument, and its config field
# arguments that change the network -> the values that our model supports; absent arguments are accepted
_ONLY: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "num_experts": (None,),
        "num_moe_experts": (None,),
        "experimental_attention_variant": (None,),
        "heterogeneous_block_specs": (False, None),
        "activation_func_clamp_value": (None,),
        "glu_linear_offset": (0.0, None),
        "softmax_scale": (None,),
        "multi_latent_attention": (False, None),
        "mtp_num_layers": (None, 0),
        "qk_l2_norm": (False, None),
        "attention_output_gate": (False, None),
        "softmax_type": ("vanilla", None),
        "apply_residual_connection_post_layernorm": (False, None),
        "quick_geglu": (False, None),
        "rotary_seq_len_interpolation_factor": (None, 1),
        "no_rope_freq": (None,),
        "is_hybrid_model": (False, None),
        "heterogeneous_layers_config_path": (None,),
        "scale_logits_with_mup": (False, None),
        "use_mup": (False, None),
    }
)


@dataclass(frozen=True)
class Rows:
    """Rows [first, last) of one of our tensors, which are the rows from ``source`` on in theirs."""

    first: int
    last: int
    source: int


def config_of(arguments: Mapping[str, Any], vocab_size: int) -> TransformerConfig:
    """Returns the config for Megatron's ``arguments``; ``vocab_size`` is that of the embedding, padding included.

    Raises ConfigError naming everything that our model cannot represent.
    """
    wrong = [
        f"{name} must be {only[0]!r}; it is {shown(arguments[name])}"
        for name, only in _ONLY.items()
        if name in arguments and arguments[name] not in only
    ]
    kind = arguments.get("position_embedding_type", "learned_absolute")
    if kind not in ("rope", "learned_absolute"):
        wrong.append(f"position_embedding_type must be 'rope' or 'learned_absolute'; it is {shown(kind)}")
    if wrong:
        raise ConfigError("Megalith cannot represent this Megatron model:\n- " + "\n- ".join(wrong))
    needed = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size")
    if missing := [name for name in needed if type(arguments.get(name)) is not int]:
        raise ConfigError(f"Megatron's arguments must have integers for {', '.join(missing)}; they do not")
    settings: dict[str, Any] = {name: arguments[name] for name in needed}
    settings |= {
        "vocab_size": vocab_size,
        "num_query_groups": _query_groups(arguments),
        "kv_channels": arguments.get("kv_channels"),
        "activation": _activation(arguments),
        "normalization": arguments.get("normalization", "LayerNorm"),
        "layernorm_epsilon": arguments.get("norm_epsilon", arguments.get("layernorm_epsilon", 1e-5)),
        "position_embedding_type": kind,
        "residual": {"zero_centered_norm": any(arguments.get(name) for name in _ZERO_CENTERED)},
        "attention": _attention(arguments),
        "add_bias_linear": bool(arguments.get("add_bias_linear")),
        "tie_word_embeddings": not arguments.get("untie_embeddings_and_output_weights", False),
        "hidden_dropout": arguments.get("hidden_dropout", 0.1),
        "attention_dropout": arguments.get("attention_dropout", 0.1),
        "init_method_std": arguments.get("init_method_std", 0.02),
    }
    if kind == "rope":
        settings["rope"] = _rope(arguments)
    else:
        settings["max_position_embeddings"] = arguments.get("max_position_embeddings")
    try:
        return TransformerConfig(**{name: value for name, value in settings.items() if value is not None})
    except ValidationError as error:
        # omit settings whose defaults depend on an invalid one
        found = [each for each in error.errors() if each["type"] != "default_factory_not_called"]
        told = "\n- ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in found)
        raise ConfigError(f"Megalith does not support these Megatron arguments:\n- {told}") from error


def source_of(name: str, config: TransformerConfig) -> tuple[str, int | None, tuple[Rows, ...]]:
    """Returns where our parameter ``name`` is stored: their key without the layer, the layer, and the map of rows."""
    if name in _OUTSIDE:
        return _OUTSIDE[name], None, ()
    _, _, layer, inside = name.split(".", 3)
    module, part = inside.rsplit(".", 1)
    if module in _SPLIT:
        theirs, rows = _SPLIT[module]
        return f"{theirs}.{part}", int(layer), tuple(rows(config))
    return _IN_LAYER[inside], int(layer), ()


def key_in_layer(key: str, layer: int | None = None) -> str:
    """Returns the full key of a layer's tensor: of all layers stacked, or of one."""
    return f"decoder.layers.{key}" if layer is None else f"decoder.layers.{layer}.{key}"


def _heads_of(which: str) -> Callable[[TransformerConfig], Iterator[Rows]]:
    """Rows of q, k or v, which are interleaved by group: A/G heads of q, one of k, one of v."""

    def rows(config: TransformerConfig) -> Iterator[Rows]:
        G, D = config.num_query_groups, config.kv_channels
        heads = config.num_attention_heads // G
        offset, count = {"q": (0, heads), "k": (heads, 1), "v": (heads + 1, 1)}[which]
        for group in range(G):
            yield Rows(group * count * D, (group + 1) * count * D, (group * (heads + 2) + offset) * D)

    return rows


def _gate(config: TransformerConfig) -> Iterator[Rows]:
    yield Rows(0, config.ffn_hidden_size, 0)


def _up(config: TransformerConfig) -> Iterator[Rows]:
    F = config.ffn_hidden_size
    yield Rows(0, F, F if config.gate_activation is not None else 0)


_SPLIT: Mapping[str, tuple[str, Callable[[TransformerConfig], Iterator[Rows]]]] = MappingProxyType(
    {
        "self_attn.q_proj": (_QKV, _heads_of("q")),
        "self_attn.k_proj": (_QKV, _heads_of("k")),
        "self_attn.v_proj": (_QKV, _heads_of("v")),
        "mlp.gate_proj": (_FC1, _gate),
        "mlp.up_proj": (_FC1, _up),
    }
)


def _query_groups(arguments: Mapping[str, Any]) -> Any:
    """Megatron uses num_query_groups, whose default is 1, only if group_query_attention is set."""
    return arguments.get("num_query_groups") if arguments.get("group_query_attention") else None


def _rope(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of ``model.rope``. Megatron's scaling is that of Llama 3.1; only its factor is an argument."""
    base, percent = arguments.get("rotary_base", 10000), arguments.get("rotary_percent")
    if not isinstance(base, int | float) or not 1 < base < 2**63:
        raise ConfigError(f"Megatron's rotary_base must be a number above 1; it is {shown(base)}")
    rope = {
        "base": float(base),
        "percent": 1.0 if percent is None else percent,
        "interleaved": bool(arguments.get("rotary_interleaved")),
    }
    if not arguments.get("use_rope_scaling"):
        return rope
    factor = arguments.get("rope_scaling_factor", 8.0)
    return rope | {"scaling": {"type": "llama3", "factor": factor, "original_max_position_embeddings": 8192}}


def _attention(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of ``model.attention``; QK norms are of the same kind as all others."""
    norm = arguments.get("normalization", "LayerNorm") if arguments.get("qk_layernorm") else None
    return {"qk_norm": norm, "qkv_bias": True if arguments.get("add_qkv_bias") else None, **_windows(arguments)}


def _windows(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """``window`` and ``window_layers``. Megatron's window does not count the query, and its layers count from 1."""
    size, skip = arguments.get("window_size"), arguments.get("window_attn_skip_freq")
    if size is None:
        return {}
    if not isinstance(size, tuple | list) or [type(n) for n in size] != [int, int] or size[0] < -1 or size[1] != 0:
        raise ConfigError(
            "Megatron's window_size must be the number of tokens before a query and 0 for those after it, such as "
            f"(127, 0), or (-1, 0) for all tokens before it; it is {shown(size)}"
        )
    num_layers = min(arguments["num_layers"], MOST_LAYERS)
    if skip is None:
        windowed = (True,) * num_layers
    elif type(skip) is int and skip > 0:
        windowed = tuple(number % skip != 0 for number in range(1, num_layers + 1))
    elif isinstance(skip, list) and len(skip) == num_layers and all(has in (0, 1) for has in skip):
        windowed = tuple(map(bool, skip))
    else:
        raise ConfigError(
            "Megatron's window_attn_skip_freq must be an integer n, if every n-th layer has no window, or a list with "
            f"0 or 1 for each of the {num_layers} layers; it is {shown(skip)}"
        )
    return (
        {"window": size[0] + 1, "window_layers": shortest_pattern(windowed)} if any(windowed) and size[0] >= 0 else {}
    )


def _activation(arguments: Mapping[str, Any]) -> str:
    """Megatron's bias-GELU fusion uses the tanh approximation, and so does its openai_gelu."""
    for name in ("swiglu", "squared_relu"):
        if arguments.get(name):
            return name
    by_tanh = arguments.get("openai_gelu") or arguments.get("bias_gelu_fusion", True)
    return "gelu_tanh" if by_tanh else "gelu"
