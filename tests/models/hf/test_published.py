"""Fields of published config.json files that no class of transformers writes any more, and that we must read."""

from typing import Any

import pytest

from megalith.errors import ConfigError
from megalith.models.hf.family import Family
from megalith.models.hf.gpt2 import GPT2
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


@pytest.mark.parametrize(
    ("family", "published", "num_layers", "hidden_size"), [(QWEN2, QWEN2_5, 24, 896), (GPT2, GPT2_MEDIUM, 24, 1024)]
)
def test_a_published_config_is_read(family: Family, published: dict[str, Any], num_layers: int, hidden_size: int):
    found = family.config_from_hf(published)
    assert (found.num_layers, found.hidden_size) == (num_layers, hidden_size)


def test_positions_of_images_are_refused():
    with pytest.raises(ConfigError, match="use_mrope"):
        QWEN2.config_from_hf({**QWEN2_5, "use_mrope": True})
