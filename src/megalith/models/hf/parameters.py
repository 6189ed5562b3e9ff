"""The parameters that a model has: their names, which are those of Hugging Face's Llama, and their whole shapes.

Alphabet: H hidden, A heads, G kv groups, D head size, F ffn hidden, V vocabulary, P positions. Weights are [out, in].
"""

from collections.abc import Mapping
from typing import Any

from megalith.config import TransformerConfig
from megalith.errors import CheckpointError, ConfigError

__all__ = ["Shape", "check", "parameter_shapes", "require"]

Shape = tuple[int, ...]

_MOST_TOLD = 50  # tensors that do not fit; a wrong number of layers makes thousands


def parameter_shapes(config: TransformerConfig) -> dict[str, Shape]:
    """Name -> shape of every parameter of ``GPTModel(config)``, unsharded.

    Raises ConfigError if ``vocab_size`` is not known yet.
    """
    if config.vocab_size is None:
        raise ConfigError("model.vocab_size must be set to name the parameters; it is None until a tokenizer is known")
    V, H = config.vocab_size, config.hidden_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (V, H)}
    if config.position_embedding_type == "learned_absolute":
        assert config.max_position_embeddings is not None, "validated together with learned_absolute"
        shapes["model.embed_positions.weight"] = (config.max_position_embeddings, H)
    num_ahead = 0 if config.mtp is None else config.mtp.num_layers
    for layer in range(config.num_layers + num_ahead):
        parts = _layer_shapes(config) | (_joining_shapes(config) if layer >= config.num_layers else {})
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    shapes |= _norm("model.norm", config)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (V, H)
    return shapes


def check(found: Mapping[str, Shape], wanted: Mapping[str, Shape], source: str) -> None:
    """Raises CheckpointError listing every name of ``found`` that is missing, unexpected or of another shape."""
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
        raise CheckpointError(f"the tensors of {source} do not fit its config:\n- {lines}")


def require(architecture: str, config: TransformerConfig, **allowed: tuple[Any, ...]) -> None:
    """Raises ConfigError naming every field of ``config`` that has none of its ``allowed`` values."""
    wrong = [
        f"{name} must be {' or '.join(map(repr, values))}; got {getattr(config, name)!r}"
        for name, values in allowed.items()
        if getattr(config, name) not in values
    ]
    if wrong:
        raise ConfigError(f"{architecture} cannot represent this model:\n- " + "\n- ".join(wrong))


def _layer_shapes(config: TransformerConfig) -> dict[str, Shape]:
    H, F = config.hidden_size, config.ffn_hidden_size
    Q, KV = config.num_attention_heads * config.kv_channels, config.num_query_groups * config.kv_channels  # A*D, G*D
    linears = {"self_attn.q_proj": (Q, H), "self_attn.k_proj": (KV, H), "self_attn.v_proj": (KV, H)}
    linears["self_attn.o_proj"] = (H, Q)
    if config.gate_activation is not None:
        linears["mlp.gate_proj"] = (F, H)
    linears |= {"mlp.up_proj": (F, H), "mlp.down_proj": (H, F)}
    shapes: dict[str, Shape] = _norm("input_layernorm", config) | _norm("post_attention_layernorm", config)
    for name, shape in linears.items():
        shapes[f"{name}.weight"] = shape
        if config.add_bias_linear:
            shapes[f"{name}.bias"] = shape[:1]
    return shapes


def _joining_shapes(config: TransformerConfig) -> dict[str, Shape]:
    """What a module of multi-token prediction has besides its layer, under the names of DeepSeek-V3's weights."""
    H = config.hidden_size
    norms = _norm("enorm", config) | _norm("hnorm", config) | _norm("shared_head.norm", config)
    return norms | {"eh_proj.weight": (H, 2 * H)}


def _norm(name: str, config: TransformerConfig) -> dict[str, Shape]:
    parts = ("weight", "bias") if config.normalization == "LayerNorm" else ("weight",)
    return {f"{name}.{part}": (config.hidden_size,) for part in parts}
