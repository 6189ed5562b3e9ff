"""The size of a GPT and its training cost per token, in closed form from the settings.

Parameters are those of ``models.hf.parameter_shapes``, name by name.

Model FLOPs per token: a multiply and an add for every weight that a matmul uses, and the two matmuls of attention over
the S/2 positions that a token sees on average under a causal mask; the backward costs twice the forward:

    3 (2 W + 2 A D S L),    W = L (H (A + 2G) D + A D H + m H F) + V H

for L layers, H hidden, A heads, G kv groups, D head size, F ffn, V vocabulary, and an MLP of m matrices, 3 with a gate,
else 2; an output gate of attention adds A D H to a layer.

In latent attention of ranks Zq and Z, with N unrotated and R rotated features per head and Dv features of a value, a
layer has Zq (H + A (N + R)) + H (Z + R) + Z A (N + Dv) + A Dv H instead of q, k, v and o, and A (D + Dv) replaces
2 A D.

In a layer with a window of w < S tokens, a query sees w (2S - w) / 2S of them on average, instead of S/2.
A module of multi-token prediction has the weights and the attention of a layer, 2 H^2, and V H of the head once more.
A layer with experts has, instead of m H F: E H of the router and K m H F of the K experts that a token is sent to, with
latents K m D F + 2 H D; and those of the shared experts, m H F, and H of their gate.

This is the count of Chowdhery et al. 2022 ("PaLM", arXiv:2204.02311, appendix B: 6 N + 12 L H Q T) with attention
halved for the causal mask, and without the parameters that only add or look up (embeddings, norms, biases).
Recomputation is not counted: these are model FLOPs, not hardware FLOPs.
"""

from math import prod

from megalith.config import MLAConfig, TransformerConfig
from megalith.models.hf import parameter_shapes
from megalith.parallel.pipeline.stages import ModelCosts

__all__ = ["expert_parameters", "flops_per_token", "layer_flops", "parameters", "stage_costs"]


def parameters(config: TransformerConfig, vocab_size: int) -> int:
    """Returns the number of parameters of a model of any kind: exactly that of the built model."""
    return sum(map(prod, _shapes(config, vocab_size).values()))


def expert_parameters(config: TransformerConfig, vocab_size: int) -> int:
    """Returns how many of them belong to routed experts, not counting routers and shared experts."""
    return sum(prod(shape) for name, shape in _shapes(config, vocab_size).items() if ".mlp.experts." in name)


def flops_per_token(config: TransformerConfig, vocab_size: int, seq_length: int) -> int:
    """Returns model FLOPs of training per token of a row of ``seq_length``: forward and backward, attention halved."""
    costs = stage_costs(config, vocab_size, seq_length)
    return sum(costs.layers) + costs.embedding + costs.head


def stage_costs(config: TransformerConfig, vocab_size: int, seq_length: int) -> ModelCosts:
    """Returns ``flops_per_token`` by part; an embedding costs 0."""
    H, L, M = config.hidden_size, config.num_layers, _num_modules(config)
    layers = [layer_flops(config, layer, seq_length) for layer in range(L + M)]
    head, joining = 3 * 2 * vocab_size * H, 3 * 2 * 2 * H * H
    # the modules of multi-token prediction are in the stage of the head
    return ModelCosts(tuple(layers[:L]), embedding=0, head=head + sum(layers[L:]) + M * (joining + head))


def layer_flops(config: TransformerConfig, layer: int, seq_length: int, *, causal: bool = True) -> int:
    """Returns FLOPs per token of a row of ``seq_length``, forward and backward; non-causal attention costs twice."""
    attention = _attention_flops(config, layer, seq_length) * (1 if causal else 2)
    return 3 * (2 * (_attention_weights(config) + _mlp_weights(config, layer)) + attention)


def _shapes(config: TransformerConfig, vocab_size: int) -> dict[str, tuple[int, ...]]:
    return parameter_shapes(config.model_copy(update={"vocab_size": vocab_size}))


def _num_modules(config: TransformerConfig) -> int:
    """Returns the number of multi-token prediction modules."""
    return 0 if config.mtp is None else config.mtp.num_modules


def _attention_flops(config: TransformerConfig, layer: int, seq_length: int) -> int:
    """Returns forward FLOPs per token of the two matmuls of attention."""
    seen = min(config.attention.window_of(layer) or seq_length, seq_length)
    queries, values = _widths(config)[0], _value_width(config)
    return (queries + values) * seen * (2 * seq_length - seen) // seq_length


def _attention_weights(config: TransformerConfig) -> int:
    """Returns how many weights of a layer's attention matmuls use."""
    if config.mla is not None:
        return _latent_weights(config, config.mla)
    queries, keys = _widths(config)
    reads_queries = 3 if config.attention.output_gate else 2  # q, o and the gate
    return config.hidden_size * (reads_queries * queries + 2 * keys)


def _mlp_weights(config: TransformerConfig, layer: int) -> int:
    """Returns how many weights of a layer's feed-forward part matmuls use per token."""
    H, m, moe = config.hidden_size, 2 if config.gate_activation is None else 3, config.moe
    if moe is None or not moe.has_experts(layer):
        return m * H * config.ffn_hidden_size
    D, latents = (H, 0) if moe.latent_size is None else (moe.latent_size, 2 * H * moe.latent_size)
    routed = moe.num_experts * H + moe.top_k * m * D * config.expert_ffn_hidden_size
    shared = m * H * (moe.shared_ffn_hidden_size or 0) + (H if moe.shared_expert_gate else 0)
    return routed + latents + shared


def _latent_weights(config: TransformerConfig, mla: MLAConfig) -> int:
    """Returns how many weights of a layer's latent attention matmuls use."""
    H, A, (queries, _) = config.hidden_size, config.num_attention_heads, _widths(config)
    rank = mla.q_lora_rank
    to_queries = H * queries if rank is None else rank * (H + queries)
    to_latent = H * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    to_heads = mla.kv_lora_rank * A * (mla.qk_nope_head_dim + mla.v_head_dim)
    return to_queries + to_latent + to_heads + A * mla.v_head_dim * H


def _widths(config: TransformerConfig) -> tuple[int, int]:
    """Returns A D and G D."""
    return config.num_attention_heads * config.kv_channels, config.num_query_groups * config.kv_channels


def _value_width(config: TransformerConfig) -> int:
    """Returns A Dv, the input width of the output projection."""
    return config.num_attention_heads * (config.kv_channels if config.mla is None else config.mla.v_head_dim)
