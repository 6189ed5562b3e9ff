"""Small transformers of every shape, and the arguments to build their parts in one process."""

from typing import Any

import torch

from megalith.config import TransformerConfig
from megalith.parallel.build_options import BuildOptions
from megalith.topology.process_groups_config import ProcessGroupCollection

# a prime vocabulary; grouped heads; F is not a power of two
_SIZES = {
    "vocab_size": 31,
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_query_groups": 4,
    "ffn_hidden_size": 24,
    "init_method_std": 0.5,
}
_LEARNED = {"position_embedding_type": "learned_absolute", "max_position_embeddings": 32}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"num_query_groups": 2},
    "gpt2": {
        "normalization": "LayerNorm",
        "activation": "gelu_tanh",
        "add_bias_linear": True,
        "tie_word_embeddings": True,
        **_LEARNED,
    },
    "rope, exact gelu, biases": {"activation": "gelu", "add_bias_linear": True, "num_query_groups": 1},
    "latents": {
        "mla": {
            "kv_lora_rank": 10,
            "q_lora_rank": 12,
            "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 4,
            "v_head_dim": 5,
            "norm_epsilon": 1e-3,
        },
        "rope": {"interleaved": True},
        "attention": {"qkv_bias": True, "output_bias": True},
    },
    "learned positions, swiglu, narrow heads": {"normalization": "LayerNorm", "kv_channels": 6, **_LEARNED},
}


def config(shape: str = "llama", **changes: Any) -> TransformerConfig:
    return TransformerConfig(**_SIZES | SHAPES[shape] | changes)


def options(**changes: Any) -> BuildOptions:
    return BuildOptions(**{"pg_collection": ProcessGroupCollection.single(), "dtype": torch.float64} | changes)
