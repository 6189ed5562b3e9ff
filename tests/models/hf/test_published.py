"""Fields of published config.json files that transformers no longer writes, but that we must read."""

from typing import Any

import pytest

from megalith.errors import ConfigError
from megalith.models.hf.family import Family
from megalith.models.hf.gemma import GEMMA2
from megalith.models.hf.gpt2 import GPT2
from megalith.models.hf.llama import LLAMA
from megalith.models.hf.qwen import QWEN2

QWEN2_5 = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
    "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.40.1",
    "use_cache": True, "use_mrope": False, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
GPT2_MEDIUM = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
    "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2", "n_ctx": 1024, "n_embd": 1024, "n_head": 16, "n_layer": 24, "n_positions": 1024,
    "n_special": 0, "output_past": True, "predict_special_tokens": True, "resid_pdrop": 0.1,
    "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50257,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}  # fmt: skip


GEMMA2_9B = {
    "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
    "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 16,
    "num_hidden_layers": 42, "num_key_value_heads": 8, "pad_token_id": 0, "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_size": 4096,
    "torch_dtype": "float32", "transformers_version": "4.42.0.dev0", "use_cache": True, "vocab_size": 256000,
}  # fmt: skip
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
    "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "model_type": "llama",
    "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True,
    "vocab_size": 49152,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "published", "num_layers", "hidden_size"),
    [
        (QWEN2, QWEN2_5, 24, 896),
        (GPT2, GPT2_MEDIUM, 24, 1024),
        (GPT2, GPT2_MEDIUM | {"_num_labels": 1, "n_layer": 6}, 6, 1024),
        (GEMMA2, GEMMA2_9B, 42, 3584),
        (LLAMA, SMOLLM2, 30, 576),
    ],
)
def test_a_published_config_is_read(family: Family, published: dict[str, Any], num_layers: int, hidden_size: int):
    found = family.config_from_hf(published)
    assert (found.num_layers, found.hidden_size) == (num_layers, hidden_size)


def test_positions_of_images_are_refused():
    with pytest.raises(ConfigError, match="use_mrope"):
        QWEN2.config_from_hf({**QWEN2_5, "use_mrope": True})


def test_fields_that_contradict_what_transformers_computes_are_refused():
    with pytest.raises(ConfigError, match=r"sliding_window_size must equal sliding_window \(4096\).*got 1024"):
        GEMMA2.config_from_hf({**GEMMA2_9B, "sliding_window_size": 1024})
    with pytest.raises(ConfigError, match="rope_interleaved must be False"):
        LLAMA.config_from_hf({**SMOLLM2, "rope_interleaved": True})
