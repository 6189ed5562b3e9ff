"""Names and unsharded shapes of all tensors of a model; the names are those of Hugging Face's Llama.

Alphabet: H hidden, A heads, G kv groups, D head size, F ffn hidden, V vocabulary, P positions. Weights are [out, in].
"""

from collections.abc import Callable, Container, Iterator, Mapping
from functools import reduce
from types import MappingProxyType
from typing import Any

from megalith.config import MLAConfig, ModelKind, MoEConfig, TransformerConfig
from megalith.config.dotted import parent
from megalith.config.relevance import CONDITIONS
from megalith.config.settings_group import SettingsGroup
from megalith.errors import CheckpointError, ConfigError

__all__ = [
    "Shape",
    "buffer_shapes",
    "check",
    "left_open",
    "num_layers_in_all",
    "parameter_shapes",
    "require",
    "state_shapes",
]

Shape = tuple[int, ...]

# the norms of a layer, by model.residual.norm_placement
_NORMS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "pre": ("input_layernorm", "post_attention_layernorm"),
        "post": ("post_attention_layernorm", "post_mlp_layernorm"),
        "sandwich": (
            "input_layernorm",
            "self_attn_output_layernorm",
            "post_attention_layernorm",
            "mlp_output_layernorm",
        ),
    }
)
_MOST_TOLD = 50  # mismatched tensors listed in an error; a wrong number of layers causes thousands


def parameter_shapes(config: TransformerConfig) -> dict[str, Shape]:
    """Returns name -> unsharded shape of every parameter of the model that ``config`` describes, of any kind.

    Raises ConfigError if ``vocab_size`` is not set yet.
    """
    if config.vocab_size is None:
        raise ConfigError("model.vocab_size must be set to list the parameters; it is None until a tokenizer is known")
    V, H = config.vocab_size, config.hidden_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (V, H)}
    if config.position_embedding_type == "learned_absolute":
        assert config.max_position_embeddings is not None, "validated together with learned_absolute"
        shapes["model.embed_positions.weight"] = (config.position_offset + config.max_position_embeddings, H)
    if config.t5 is not None:
        shapes |= _stack_shapes(config, "encoder", config.num_layers)
        shapes |= _stack_shapes(config, "decoder", config.t5.num_decoder_layers)
        return shapes | _OF_KINDS[config.kind](config)
    for layer in range(num_layers_in_all(config)):
        parts = _layer_shapes(config, layer) | (_joining_shapes(config) if layer >= config.num_layers else {})
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    if config.residual.norm_placement != "post":
        shapes |= _norm("model.norm", config)
    return shapes | _OF_KINDS[config.kind](config)


def buffer_shapes(config: TransformerConfig) -> dict[str, Shape]:
    """Returns name -> shape of every buffer of the model that training changes; all are float32."""
    if config.moe is None:
        return {}
    router = config.moe.router
    names = [] if router.expert_bias_update_rate is None else ["e_score_correction_bias"]
    names += ["quantile_offsets"] if router.selection == "quantile" else []
    return {
        f"model.layers.{layer}.mlp.gate.{name}": (config.moe.num_experts,)
        for layer in range(num_layers_in_all(config))
        if config.moe.has_experts(layer)
        for name in names
    }


def state_shapes(config: TransformerConfig) -> dict[str, Shape]:
    """Returns parameter and buffer shapes, all that a checkpoint stores of the model. Raises as the former does."""
    return parameter_shapes(config) | buffer_shapes(config)


def num_layers_in_all(config: TransformerConfig) -> int:
    """Returns the number of layers, including those of multi-token prediction modules."""
    return config.num_layers + (0 if config.mtp is None else config.mtp.num_modules)


def check(found: Mapping[str, Shape], wanted: Mapping[str, Shape], source: str) -> None:
    """Raises CheckpointError listing up to 50 tensors that are missing, unexpected or of another shape."""
    wrong = [f"missing: {name}" for name in wanted if name not in found]
    wrong += [f"unexpected: {name} {list(shape)}" for name, shape in found.items() if name not in wanted]
    wrong += [
        f"wrong shape: {name} must be {list(shape)}; got {list(found[name])}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    if wrong:
        more = [f"and {len(wrong) - _MOST_TOLD:,} more"] if len(wrong) > _MOST_TOLD else []
        lines = "\n- ".join([*wrong[:_MOST_TOLD], *more])
        raise CheckpointError(f"the tensors of {source} do not match its config:\n- {lines}")


def require(architecture: str, config: TransformerConfig, **allowed: tuple[Any, ...]) -> None:
    """Raises ConfigError naming every field of ``config`` that has none of its ``allowed`` values.

    Fields of nested groups have dotted names. Those that are not in ``allowed`` must have their defaults, and an
    optional group without any field in ``allowed`` must be absent.
    """
    wrong = [
        f"{name} must be {' or '.join(map(repr, values))}; got {value!r}"
        for name, values in (dict(_nested_defaults(config, {parent(name) for name in allowed})) | allowed).items()
        if (value := _setting(config, name)) not in values
    ]
    if wrong:
        raise ConfigError(f"{architecture} cannot represent this model:\n- " + "\n- ".join(wrong))


def left_open(config: TransformerConfig, *names: str) -> dict[str, tuple[Any, ...]]:
    """For ``require``: allows any value of the settings ``names``."""
    return {name: (_setting(config, name),) for name in names}


def _setting(config: TransformerConfig, name: str) -> Any:
    """Returns the value of the setting with the dotted ``name``; None if its group is absent."""
    return reduce(lambda owner, field: None if owner is None else getattr(owner, field), name.split("."), config)


def _nested_defaults(
    group: SettingsGroup, opened: Container[str], prefix: str = ""
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yields the default of every field in groups nested in ``group``; None for optional groups not in ``opened``."""
    for field, nested in group.nested_groups.items():
        name, value = f"{prefix}{field}", getattr(group, field)
        if group.is_optional(field) and group.name_of(field) not in CONDITIONS and name not in opened:
            yield name, (None,)
        elif value is not None:
            fields = nested.model_fields.items()
            yield from ((f"{name}.{one}", (info.default,)) for one, info in fields if one not in nested.nested_groups)
            yield from _nested_defaults(value, opened, f"{name}.")


def _stack_shapes(config: TransformerConfig, stack: str, num_layers: int) -> dict[str, Shape]:
    """Shapes of one stack of a T5: its layers, relative position table and final norm."""
    relative, crosses, shapes = config.relative_position, stack == "decoder", dict[str, Shape]()
    assert relative is not None, "validated together with model.t5"
    shapes[f"model.{stack}.position_bias.weight"] = (relative.num_buckets, config.num_attention_heads)
    for layer in range(num_layers):
        parts = _layer_shapes(config, layer) | (_cross_attention_shapes(config) if crosses else {})
        shapes |= {f"model.{stack}.layers.{layer}.{name}": shape for name, shape in parts.items()}
    return shapes if config.residual.norm_placement == "post" else shapes | _norm(f"model.{stack}.norm", config)


def _cross_attention_shapes(config: TransformerConfig) -> dict[str, Shape]:
    """Shapes of cross attention, the same as of plain self-attention, and of the norms around it."""
    shapes = {name.replace("self_attn.", "cross_attn."): shape for name, shape in _attention_shapes(config).items()}
    sandwiched = config.residual.norm_placement == "sandwich"
    for norm in ("cross_attn_layernorm", *(["cross_attn_output_layernorm"] if sandwiched else [])):
        shapes |= _norm(norm, config)
    return shapes


def _lm_head_shapes(config: TransformerConfig) -> dict[str, Shape]:
    return {} if config.tie_word_embeddings else {"lm_head.weight": (_vocab_size(config), config.hidden_size)}


def _bert_shapes(config: TransformerConfig) -> dict[str, Shape]:
    """Shapes of the token type embedding, the embedding's norm, and the heads."""
    H, V, bert = config.hidden_size, _vocab_size(config), config.bert
    assert bert is not None, "config.kind is bert"
    shapes: dict[str, Shape] = {}
    if bert.num_token_types:
        shapes["model.embed_token_types.weight"] = (bert.num_token_types, H)
    if config.residual.norm_placement == "post":
        shapes |= _norm("model.embed_norm", config)
    if bert.head == "pretraining":
        shapes |= _linear("lm_transform.dense", (H, H)) | _norm("lm_transform.norm", config) | {"lm_head.bias": (V,)}
        shapes |= {} if config.tie_word_embeddings else {"lm_head.weight": (V, H)}
    if num_scores := bert.num_text_scores:
        head = "binary_head.linear" if bert.head == "pretraining" else "classifier.linear"
        shapes |= _linear("pooler.dense", (H, H)) | _linear(head, (num_scores, H))
    if bert.head == "embedding" and bert.embedding_size is not None:
        shapes |= _linear("embedder.projection", (bert.embedding_size, H))
    return shapes


# what each kind of model has in addition to its trunk
_OF_KINDS: Mapping[ModelKind, Callable[[TransformerConfig], dict[str, Shape]]] = MappingProxyType(
    {"gpt": _lm_head_shapes, "bert": _bert_shapes, "t5": _lm_head_shapes}
)


def _vocab_size(config: TransformerConfig) -> int:
    assert config.vocab_size is not None, "checked by parameter_shapes"
    return config.vocab_size


def _linear(name: str, shape: tuple[int, int]) -> dict[str, Shape]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _layer_shapes(config: TransformerConfig, layer: int) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for name in _NORMS[config.residual.norm_placement]:
        shapes |= _norm(name, config)
    shapes |= _attention_shapes(config)
    if config.moe is not None and config.moe.has_experts(layer):
        return shapes | _moe_shapes(config, config.moe)
    return shapes | _mlp_shapes("mlp", config, config.ffn_hidden_size)


def _mlp_shapes(name: str, config: TransformerConfig, F: int) -> dict[str, Shape]:
    H = config.hidden_size
    linears = {"up_proj": (F, H), "down_proj": (H, F)}
    if config.gate_activation is not None:
        linears = {"gate_proj": (F, H), **linears}
    shapes: dict[str, Shape] = {}
    for linear, shape in linears.items():
        shapes[f"{name}.{linear}.weight"] = shape
        if config.mlp_bias:
            shapes[f"{name}.{linear}.bias"] = shape[:1]
    return shapes


def _moe_shapes(config: TransformerConfig, moe: MoEConfig) -> dict[str, Shape]:
    E, H, F, D = moe.num_experts, config.hidden_size, config.expert_ffn_hidden_size, moe.latent_size
    shapes: dict[str, Shape] = {"mlp.gate.weight": (E, H)}
    if moe.router.bias:
        shapes["mlp.gate.bias"] = (E,)
    inner, entering = ((F,), "up_proj") if config.gate_activation is None else ((2, F), "gate_up_proj")
    shapes |= {f"mlp.experts.{entering}": (E, *inner, D or H), "mlp.experts.down_proj": (E, D or H, F)}
    if config.mlp_bias:
        shapes |= {f"mlp.experts.{entering}_bias": (E, *inner), "mlp.experts.down_proj_bias": (E, D or H)}
    if moe.shared_ffn_hidden_size is not None:
        shapes |= _mlp_shapes("mlp.shared_experts", config, moe.shared_ffn_hidden_size)
    if moe.shared_expert_gate:
        shapes["mlp.shared_experts.gate.weight"] = (1, H)
    if D is not None:
        shapes |= {"mlp.to_latents.weight": (D, H), "mlp.from_latents.weight": (H, D)}
    return shapes


def _attention_shapes(config: TransformerConfig) -> dict[str, Shape]:
    if config.mla is not None:
        return _latent_attention_shapes(config, config.mla)
    H, A, D, attention = config.hidden_size, config.num_attention_heads, config.kv_channels, config.attention
    Q, KV = A * D, config.num_query_groups * D
    linears = {"q_proj": (Q, H), "k_proj": (KV, H), "v_proj": (KV, H), "o_proj": (H, Q)}
    if attention.output_gate:
        linears["gate_proj"] = (Q, H)
    shapes: dict[str, Shape] = {}
    for name, shape in linears.items():
        shapes[f"self_attn.{name}.weight"] = shape
        if config.output_bias if name == "o_proj" else config.qkv_bias:
            shapes[f"self_attn.{name}.bias"] = shape[:1]
    for norm in ("q_norm", "k_norm"):
        shapes |= {f"self_attn.{norm}.{part}": (D,) for part in attention.norm_parameters}
    return shapes | ({"self_attn.sinks": (A,)} if attention.softmax == "learnable" else {})


def _joining_shapes(config: TransformerConfig) -> dict[str, Shape]:
    """Shapes that a multi-token prediction module adds to its layer, with the names of DeepSeek-V3's weights."""
    H = config.hidden_size
    norms = ("enorm", "hnorm") if config.residual.norm_placement == "post" else ("enorm", "hnorm", "shared_head.norm")
    shapes: dict[str, Shape] = {"eh_proj.weight": (H, 2 * H)}
    for name in norms:
        shapes |= _norm(name, config)
    return shapes


def _latent_attention_shapes(config: TransformerConfig, mla: MLAConfig) -> dict[str, Shape]:
    H, A, D, latent = config.hidden_size, config.num_attention_heads, config.kv_channels, mla.kv_lora_rank
    latents = {"kv_a": (latent, latent + mla.qk_rope_head_dim, "kv_a_proj_with_mqa")}
    linears = {"q_proj": (A * D, H)}
    if mla.q_lora_rank is not None:
        latents = {"q_a": (mla.q_lora_rank, mla.q_lora_rank, "q_a_proj"), **latents}
        linears = {"q_b_proj": (A * D, mla.q_lora_rank)}
    linears["kv_b_proj"] = (A * (mla.qk_nope_head_dim + mla.v_head_dim), latent)
    linears["o_proj"] = (H, A * mla.v_head_dim)
    shapes: dict[str, Shape] = {}
    for name, (size, width, projection) in latents.items():
        shapes |= _norm(f"self_attn.{name}_layernorm", config, size)
        shapes[f"self_attn.{projection}.weight"] = (width, H)
        if config.qkv_bias:
            shapes[f"self_attn.{projection}.bias"] = (width,)
    shapes |= {f"self_attn.{name}.weight": shape for name, shape in linears.items()}
    return shapes | ({"self_attn.o_proj.bias": (H,)} if config.output_bias else {})


def _norm(name: str, config: TransformerConfig, size: int | None = None) -> dict[str, Shape]:
    parts = ("weight", "bias") if config.normalization == "LayerNorm" else ("weight",)
    return {f"{name}.{part}": (config.hidden_size if size is None else size,) for part in parts}
