"""What a row costs a T5 to train, in closed form from its settings.

Layers are those of ``gpt_size``, over Se tokens of the encoder with attention to all of them, and over Sd of the
decoder, causal. Cross attention of a layer costs 3 x (2 (Sd 2 H A D + Se 2 H G D) + 4 A D Se Sd) besides, for A heads
and G groups of keys of size D, and the head 3 x 2 Sd V H for V words.
"""

from megalith.config import TransformerConfig
from megalith.parallel.pipeline.stages import ModelCosts
from megalith.training.tasks.gpt_size import layer_flops

__all__ = ["t5_costs"]


def t5_costs(config: TransformerConfig, vocab_size: int, seq_length: int, decoder_seq_length: int) -> ModelCosts:
    """Model FLOPs of training on a row of these lengths, forward and backward, by parts: an embedding only looks up."""
    assert config.t5 is not None, "the settings of a T5"
    Se, Sd, H = seq_length, decoder_seq_length, config.hidden_size
    queries, keys = (heads * config.kv_channels for heads in (config.num_attention_heads, config.num_query_groups))
    cross = 3 * (2 * (Sd * 2 * H * queries + Se * 2 * H * keys) + 4 * queries * Se * Sd)
    of_encoder = Se * layer_flops(config, 0, Se, causal=False)
    of_decoder = Sd * layer_flops(config, 0, Sd) + cross
    layers = (of_encoder,) * config.num_layers + (of_decoder,) * config.t5.num_decoder_layers
    return ModelCosts(layers, embedding=0, head=6 * Sd * vocab_size * H)
