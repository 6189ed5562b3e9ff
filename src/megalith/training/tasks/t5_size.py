"""The training cost of a T5 row, in closed form from the settings.

Layers cost as in ``gpt_size``: over Se encoder tokens with attention to all of them, and over Sd decoder tokens,
causal. Cross attention of a layer adds 3 x (2 (Sd 2 H A D + Se 2 H G D) + 4 A D Se Sd), for A heads and G key groups of
size D, and the head adds 3 x 2 Sd V H for V words.
"""

from megalith.config import TransformerConfig
from megalith.parallel.pipeline.stages import ModelCosts
from megalith.training.tasks.gpt_size import layer_flops

__all__ = ["t5_costs"]


def t5_costs(config: TransformerConfig, vocab_size: int, seq_length: int, decoder_seq_length: int) -> ModelCosts:
    """Returns model FLOPs of training on such a row, forward and backward, by part; an embedding costs 0."""
    assert config.t5 is not None, "the model is a T5"
    Se, Sd, H = seq_length, decoder_seq_length, config.hidden_size
    queries, keys = (heads * config.kv_channels for heads in (config.num_attention_heads, config.num_query_groups))
    cross = 3 * (2 * (Sd * 2 * H * queries + Se * 2 * H * keys) + 4 * queries * Se * Sd)
    of_encoder = Se * layer_flops(config, 0, Se, causal=False)
    of_decoder = Sd * layer_flops(config, 0, Sd) + cross
    layers = (of_encoder,) * config.num_layers + (of_decoder,) * config.t5.num_decoder_layers
    return ModelCosts(layers, embedding=0, head=6 * Sd * vocab_size * H)
