"""How large a GPT is and what a token costs to train, in closed form from its settings.

Parameters, for L layers, H hidden, A heads, G kv groups, D head size, F ffn, V vocabulary:

    V H                                       embedding, and again for an output head that is not tied
    P H                                       learned positions, P = max_position_embeddings
    per layer   H (A + 2G) D + A D H          q, k, v and o
                m H F                         mlp: m = 3 gated (gate, up, down), else 2 (fc1, fc2)
                (A + 2G) D + H + (m - 1) F + H    biases, with add_bias_linear
    (2L + 1) H                                norms, twice as many with a LayerNorm's bias
    per module  a layer, 2 H^2 and three norms    multi-token prediction

Model FLOPs of a token: a multiply and an add for every weight that a matmul uses, and the two matmuls of attention
over the S/2 positions that a causal mask leaves to a token on average; the backward costs twice the forward:

    3 (2 W + 2 A D S L),    W = L (H (A + 2G) D + A D H + m H F) + V H

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
    if config.add_bias_linear:
        queries, keys = _widths(config)
        total += (L + M) * (queries + 2 * keys + H + (_mlp_matmuls(config) - 1) * config.ffn_hidden_size + H)
    return total + (2 * L + 1 + 5 * M) * H * (2 if config.normalization == "LayerNorm" else 1)


def flops_per_token(config: TransformerConfig, vocab_size: int, seq_length: int) -> int:
    """Model FLOPs of training on one token of a row of ``seq_length``: forward, backward, causal attention halved."""
    costs = stage_costs(config, vocab_size, seq_length)
    return sum(costs.layers) + costs.embedding + costs.head


def stage_costs(config: TransformerConfig, vocab_size: int, seq_length: int) -> ModelCosts:
    """``flops_per_token``, part by part: an embedding only looks up."""
    H, M = config.hidden_size, _num_modules(config)
    layer = 3 * (2 * _layer_weights(config) + 2 * _widths(config)[0] * seq_length)
    head, joining = 3 * 2 * vocab_size * H, 3 * 2 * 2 * H * H
    # the modules of multi-token prediction are in the stage of the head
    return ModelCosts((layer,) * config.num_layers, embedding=0, head=head + M * (joining + layer + head))


def _num_modules(config: TransformerConfig) -> int:
    """Those of multi-token prediction."""
    return 0 if config.mtp is None else config.mtp.num_layers


def _layer_weights(config: TransformerConfig) -> int:
    """The weights of a layer that matmuls use."""
    queries, keys = _widths(config)
    return config.hidden_size * (2 * queries + 2 * keys + _mlp_matmuls(config) * config.ffn_hidden_size)


def _widths(config: TransformerConfig) -> tuple[int, int]:
    """A D and G D."""
    return config.num_attention_heads * config.kv_channels, config.num_query_groups * config.kv_channels


def _mlp_matmuls(config: TransformerConfig) -> int:
    return 2 if config.gate_activation is None else 3
