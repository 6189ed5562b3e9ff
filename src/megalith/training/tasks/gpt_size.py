"""How large a GPT is and what a token costs to train, in closed form from its settings.

Parameters, for L layers, H hidden, A heads, G kv groups, D head size, F ffn, V vocabulary:

    V H                                       embedding, and again for an output head that is not tied
    P H                                       learned positions, P = max_position_embeddings
    per layer   H (A + 2G) D + A D H          q, k, v and o, and A D H of an output gate
                m H F                         mlp: m = 3 gated (gate, up, down), else 2 (fc1, fc2)
                (A + 2G) D + H                biases of attention, each where it is set, and A D of an output gate
                (m - 1) F + H                 biases of the mlp, with mlp_bias
                2 D, or 4 D, and A            norms of queries and keys, the latter with biases; learned sinks
    (2L + 1) H                                norms, twice as many with a LayerNorm's bias; 4L + 1 of them around
                                              attention and mlp (sandwich), 2L after them (post)

With model.mla, heads of D = N + R features, R of them rotated, and Dv of a value, and latents of Zq and Z:

    per layer   H Zq + Zq A D, or H A D       q_a and q_b, or q where queries have no latent
                H (Z + R) + Z A (N + Dv)      kv_a and kv_b
                A Dv H                        o
                Zq + Z, and Zq + Z + R        norms of the latents, twice as many with a bias; biases of q_a and kv_a

Model FLOPs of a token: a multiply and an add for every weight that a matmul uses, and the two matmuls of attention
over the S/2 positions that a causal mask leaves to a token on average; the backward costs twice the forward:

    3 (2 W + 2 A D S L),    W = L (H (A + 2G) D + A D H + m H F) + V H

In latent attention it is A (D + Dv) in place of 2 A D.
In a layer with a window of w < S tokens a query sees w (2S - w) / 2S of them on average, in place of S/2.

This is the count of Chowdhery et al. 2022 ("PaLM", arXiv:2204.02311, appendix B: 6 N + 12 L H Q T) with attention
halved for the causal mask, and without the parameters that only add or look up (embeddings, norms, biases). What
recomputation repeats is not counted: it is work of the machine, not of the model.
"""

from megalith.config import MLAConfig, TransformerConfig
from megalith.parallel.pipeline.stages import ModelCosts

__all__ = ["flops_per_token", "parameters", "stage_costs"]


def parameters(config: TransformerConfig, vocab_size: int) -> int:
    """How many parameters a GPT of this shape has: exactly those of the built model."""
    H, L = config.hidden_size, config.num_layers
    total = vocab_size * H * (1 if config.tie_word_embeddings else 2) + L * _layer_weights(config)
    if config.position_embedding_type == "learned_absolute":
        assert config.max_position_embeddings is not None, "a run that is loaded has it with learned positions"
        total += config.max_position_embeddings * H
    if config.mlp_bias:
        total += L * ((_mlp_matmuls(config) - 1) * config.ffn_hidden_size + H)
    total += L * _attention_vectors(config)
    num_norms = {"pre": 2 * L + 1, "post": 2 * L, "sandwich": 4 * L + 1}[config.residual.norm_placement]
    return total + num_norms * H * (2 if config.normalization == "LayerNorm" else 1)


def flops_per_token(config: TransformerConfig, vocab_size: int, seq_length: int) -> int:
    """Model FLOPs of training on one token of a row of ``seq_length``: forward, backward, causal attention halved."""
    costs = stage_costs(config, vocab_size, seq_length)
    return sum(costs.layers) + costs.embedding + costs.head


def stage_costs(config: TransformerConfig, vocab_size: int, seq_length: int) -> ModelCosts:
    """``flops_per_token``, part by part: an embedding only looks up."""
    weights = 2 * _layer_weights(config)
    layers = tuple(3 * (weights + _attention_flops(config, layer, seq_length)) for layer in range(config.num_layers))
    return ModelCosts(layers, embedding=0, head=3 * 2 * vocab_size * config.hidden_size)


def _attention_flops(config: TransformerConfig, layer: int, seq_length: int) -> int:
    """Of a token's forward, in the two matmuls of attention."""
    seen = min(config.attention.window_of(layer) or seq_length, seq_length)
    queries, values = _widths(config)[0], _value_width(config)
    return (queries + values) * seen * (2 * seq_length - seen) // seq_length


def _layer_weights(config: TransformerConfig) -> int:
    """The weights of a layer that matmuls use."""
    mlp = _mlp_matmuls(config) * config.ffn_hidden_size
    if config.mla is not None:
        return config.hidden_size * mlp + _latent_weights(config, config.mla)
    queries, keys = _widths(config)
    reads_queries = 3 if config.attention.output_gate else 2  # q, o and the gate
    return config.hidden_size * (reads_queries * queries + 2 * keys + mlp)


def _latent_weights(config: TransformerConfig, mla: MLAConfig) -> int:
    """The weights of latent attention in a layer that matmuls use."""
    H, A, (queries, _) = config.hidden_size, config.num_attention_heads, _widths(config)
    rank = mla.q_lora_rank
    to_queries = H * queries if rank is None else rank * (H + queries)
    to_latent = H * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    to_heads = mla.kv_lora_rank * A * (mla.qk_nope_head_dim + mla.v_head_dim)
    return to_queries + to_latent + to_heads + A * mla.v_head_dim * H


def _attention_vectors(config: TransformerConfig) -> int:
    """The parameters of a layer's attention that no matmul uses: biases, norms of queries and keys, sinks."""
    (queries, keys), attention, mla = _widths(config), config.attention, config.mla
    total = 0
    if mla is not None:
        latents = (mla.q_lora_rank or 0) + mla.kv_lora_rank
        total += latents * (2 if config.normalization == "LayerNorm" else 1)
        total += latents + mla.qk_rope_head_dim if config.qkv_bias else 0
    elif config.qkv_bias:
        total += queries * (2 if attention.output_gate else 1) + 2 * keys
    if config.output_bias:
        total += config.hidden_size
    total += 2 * len(attention.norm_parameters) * config.kv_channels
    return total + (config.num_attention_heads if attention.softmax == "learnable" else 0)


def _widths(config: TransformerConfig) -> tuple[int, int]:
    """A D and G D."""
    return config.num_attention_heads * config.kv_channels, config.num_query_groups * config.kv_channels


def _value_width(config: TransformerConfig) -> int:
    """A Dv, the width of what the output projection reads."""
    return config.num_attention_heads * (config.kv_channels if config.mla is None else config.mla.v_head_dim)


def _mlp_matmuls(config: TransformerConfig) -> int:
    return 2 if config.gate_activation is None else 3
