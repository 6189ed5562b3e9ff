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
    per module  a layer, 2 H^2 and three norms    multi-token prediction (with post two norms)

Model FLOPs of a token: a multiply and an add for every weight that a matmul uses, and the two matmuls of attention
over the S/2 positions that a causal mask leaves to a token on average; the backward costs twice the forward:

    3 (2 W + 2 A D S L),    W = L (H (A + 2G) D + A D H + m H F) + V H

In a layer with a window of w < S tokens a query sees w (2S - w) / 2S of them on average, in place of S/2.
A module of multi-token prediction has the weights and the attention of a layer, 2 H^2, and V H of the head once more.

This is the count of Chowdhery et al. 2022 ("PaLM", arXiv:2204.02311, appendix B: 6 N + 12 L H Q T) with attention
halved for the causal mask, and without the parameters that only add or look up (embeddings, norms, biases). What
recomputation repeats is not counted: it is work of the machine, not of the model.
"""

from megalith.config import TransformerConfig
from megalith.parallel.pipeline.stages import ModelCosts

__all__ = ["flops_per_token", "parameters", "stage_costs"]


def parameters(config: TransformerConfig, vocab_size: int) -> int:
    """How many parameters a GPT of this shape has: exactly those of the built model."""
    H, L, M = config.hidden_size, config.num_layers, _num_modules(config)
    total = vocab_size * H * (1 if config.tie_word_embeddings else 2) + (L + M) * _layer_weights(config) + M * 2 * H * H
    if config.position_embedding_type == "learned_absolute":
        assert config.max_position_embeddings is not None, "a run that is loaded has it with learned positions"
        total += config.max_position_embeddings * H
    if config.mlp_bias:
        total += (L + M) * ((_mlp_matmuls(config) - 1) * config.ffn_hidden_size + H)
    total += (L + M) * _attention_vectors(config)
    # beside the norms of each layer: that of the model or a module, and the two that join a module's inputs
    in_layer, after = {"pre": (2, 1), "post": (2, 0), "sandwich": (4, 1)}[config.residual.norm_placement]
    num_norms = in_layer * (L + M) + after * (1 + M) + 2 * M
    return total + num_norms * H * (2 if config.normalization == "LayerNorm" else 1)


def flops_per_token(config: TransformerConfig, vocab_size: int, seq_length: int) -> int:
    """Model FLOPs of training on one token of a row of ``seq_length``: forward, backward, causal attention halved."""
    costs = stage_costs(config, vocab_size, seq_length)
    return sum(costs.layers) + costs.embedding + costs.head


def stage_costs(config: TransformerConfig, vocab_size: int, seq_length: int) -> ModelCosts:
    """``flops_per_token``, part by part: an embedding only looks up."""
    H, L, M = config.hidden_size, config.num_layers, _num_modules(config)
    weights = 2 * _layer_weights(config)
    layers = [3 * (weights + _attention_flops(config, layer, seq_length)) for layer in range(L + M)]
    head, joining = 3 * 2 * vocab_size * H, 3 * 2 * 2 * H * H
    # the modules of multi-token prediction are in the stage of the head
    return ModelCosts(tuple(layers[:L]), embedding=0, head=head + sum(layers[L:]) + M * (joining + head))


def _num_modules(config: TransformerConfig) -> int:
    """Those of multi-token prediction."""
    return 0 if config.mtp is None else config.mtp.num_modules


def _attention_flops(config: TransformerConfig, layer: int, seq_length: int) -> int:
    """Of a token's forward, in the two matmuls of attention."""
    seen = min(config.attention.window_of(layer) or seq_length, seq_length)
    return 2 * _widths(config)[0] * seen * (2 * seq_length - seen) // seq_length


def _layer_weights(config: TransformerConfig) -> int:
    """The weights of a layer that matmuls use."""
    queries, keys = _widths(config)
    reads_queries = 3 if config.attention.output_gate else 2  # q, o and the gate
    return config.hidden_size * (reads_queries * queries + 2 * keys + _mlp_matmuls(config) * config.ffn_hidden_size)


def _attention_vectors(config: TransformerConfig) -> int:
    """The parameters of a layer's attention that no matmul uses: biases, norms of queries and keys, sinks."""
    (queries, keys), attention = _widths(config), config.attention
    total = 0
    if config.qkv_bias:
        total += queries * (2 if attention.output_gate else 1) + 2 * keys
    if config.output_bias:
        total += config.hidden_size
    total += 2 * len(attention.norm_parameters) * config.kv_channels
    return total + (config.num_attention_heads if attention.softmax == "learnable" else 0)


def _widths(config: TransformerConfig) -> tuple[int, int]:
    """A D and G D."""
    return config.num_attention_heads * config.kv_channels, config.num_query_groups * config.kv_channels


def _mlp_matmuls(config: TransformerConfig) -> int:
    return 2 if config.gate_activation is None else 3
