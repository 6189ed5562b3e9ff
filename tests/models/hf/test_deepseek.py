"""models/hf/deepseek: its defaults, and what is refused; numbers are compared in test_parity."""

import pytest

from megalith.config import TransformerConfig
from megalith.errors import ConfigError
from megalith.models.hf import DEEPSEEK_V3, LLAMA
from tests.models.hf import peers

PEER = peers.PEERS["deepseek_v3"]


def test_absent_fields_have_the_defaults_of_transformers():
    sizes = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3}
    required = {**sizes, "num_attention_heads": 4}
    theirs = PEER.config(**required, num_key_value_heads=4).to_dict()
    assert DEEPSEEK_V3.config_from_hf({"model_type": "deepseek_v3", **required}) == DEEPSEEK_V3.config_from_hf(theirs)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"first_k_dense_replace": 1}, r"first_k_dense_replace must be at least num_hidden_layers \(2\), .*; got 1"),
        ({"num_key_value_heads": 2}, r"num_key_value_heads must be num_attention_heads \(4\); got 2"),
        ({"n_routed_experts": "many"}, "n_routed_experts must be a whole number; got 'many'"),
        ({"quantization_config": {"bits": 8}}, "quantization_config .* is a field that our model does not know"),
        (
            {"rope_parameters": None, "rope_scaling": {**peers.ROPE_SCALINGS["yarn"], "mscale_all_dim": 1.0}},
            "mscale_all_dim of rope_scaling must come with mscale",
        ),
    ],
)
def test_what_our_model_lacks_is_refused_by_field(fields, message):
    with pytest.raises(ConfigError, match=message):
        DEEPSEEK_V3.config_from_hf(PEER.build().config.to_dict() | fields)


SHAPE = {"vocab_size": 8, "num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
LATENT = {"kv_lora_rank": 4, "qk_rope_head_dim": 2}


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        (LLAMA, {"mla": LATENT}, r"mla must be None; got MLAConfig\(kv_lora_rank=4"),
        (DEEPSEEK_V3, {}, "mla.kv_lora_rank must be 'a size'; got None"),
        (DEEPSEEK_V3, {"mla": LATENT}, "mla.norm_epsilon must be 1e-06; got None"),
        (DEEPSEEK_V3, {"mla": {**LATENT, "norm_epsilon": 1e-4}}, "mla.norm_epsilon must be 1e-06; got 0.0001"),
        (DEEPSEEK_V3, {"mla": LATENT, "attention": {"scale": 0.5}}, "attention.scale must be None; got 0.5"),
        (DEEPSEEK_V3, {"mla": LATENT, "attention": {"qkv_bias": True}}, "output_bias must be True; got False"),
    ],
)
def test_what_a_family_lacks_is_not_written_as_one(family, settings, message):
    with pytest.raises(ConfigError, match=message):
        family.require(TransformerConfig(**SHAPE, **settings))


def test_norms_of_latents_may_follow_the_others_where_those_have_their_epsilon():
    DEEPSEEK_V3.require(TransformerConfig(**SHAPE, layernorm_epsilon=1e-6, mla=LATENT))
