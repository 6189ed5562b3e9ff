"""models/hf/gemma: config.json of Gemma 2 and 3 in each version of transformers, and refusals.

test_parity compares names, shapes and numbers with transformers.
"""

import pytest
from transformers import Gemma2Config, Gemma3TextConfig

from megalith.config import TransformerConfig
from megalith.errors import ConfigError
from megalith.models.hf import GEMMA2, GEMMA3
from tests.models.hf import peers

FAMILIES = {"gemma2": (GEMMA2, Gemma2Config), "gemma3": (GEMMA3, Gemma3TextConfig)}
LOCAL, WHOLE = "sliding_attention", "full_attention"
GEMMA = {
    "vocab_size": 8,
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "activation": "geglu_tanh",
    "residual": {"norm_placement": "sandwich", "zero_centered_norm": True},
    "multipliers": {"embedding": 4.0},
}


def written(family, **settings):
    config = TransformerConfig(**GEMMA | settings)
    return family.config_to_hf(config, max_position_embeddings=8, dtype="float32", eos_token_id=None)


@pytest.mark.parametrize(("family", "config"), FAMILIES.values(), ids=FAMILIES)
def test_absent_fields_have_the_defaults_of_transformers(family, config):
    sizes = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 13}
    required = {**sizes, "num_attention_heads": 8}
    bare = {"model_type": family.model_type, **required}
    assert family.config_from_hf(bare) == family.config_from_hf(config(**required).to_dict())


def test_layers_with_a_window_are_a_pattern_that_repeats():
    required = {name: peers.GEMMA[name] for name in GEMMA2.sizes} | {"num_hidden_layers": 26}
    of_gemma2 = GEMMA2.config_from_hf({"model_type": "gemma2", **required}).attention
    of_gemma3 = GEMMA3.config_from_hf({"model_type": "gemma3_text", **required}).attention
    assert (of_gemma2.window, of_gemma2.window_layers) == (4096, (True, False))
    assert (of_gemma3.window, of_gemma3.window_layers) == (4096, (True, True, True, True, True, False))


def test_gemma_3_of_transformers_4_reads_as_that_of_5():
    rope = {
        LOCAL: {"rope_type": "default", "rope_theta": 1e4},
        WHOLE: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    }
    new = Gemma3TextConfig(**peers.GEMMA, rope_parameters=rope, sliding_window_pattern=2).to_dict()
    kept = {
        name: new[name] for name in new if name not in ("rope_parameters", "layer_types", "_sliding_window_pattern")
    }
    old = kept | {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 2,
        "cache_implementation": "hybrid",
        "hidden_act": "gelu_pytorch_tanh",
    }
    config = GEMMA3.config_from_hf(old)
    assert config == GEMMA3.config_from_hf(new)
    assert (config.rope.base, config.rope.local_base, config.rope.scaling.factor) == (1e6, 1e4, 8.0)


def test_both_names_of_rotary_positions_are_written_for_both_versions():
    rope = {"base": 100.0, "local_base": 20.0, "scaling": {"type": "linear", "factor": 2.0}}
    fields = written(GEMMA3, rope=rope, attention={"qk_norm": "RMSNorm", "window": 4})
    assert (fields["rope_theta"], fields["rope_local_base_freq"]) == (100.0, 20.0)
    assert fields["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert fields["rope_parameters"] == {
        WHOLE: {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0},
        LOCAL: {"rope_type": "default", "rope_theta": 20.0},
    }


@pytest.mark.parametrize("family", [GEMMA2, GEMMA3])
def test_a_scale_of_one_over_the_root_of_the_head_is_written_as_the_size_of_the_head(family):
    attention = {"qk_norm": "RMSNorm" if family is GEMMA3 else None}
    fields = written(family, attention=attention, kv_channels=12)
    assert fields["query_pre_attn_scalar"] == 12
    assert family.config_from_hf(fields).attention.scale == pytest.approx(12**-0.5, rel=1e-15)
    assert fields["layer_types"] == [WHOLE, WHOLE]
    assert fields["pad_token_id"] is None


def test_one_base_for_all_layers_is_written_as_two():
    attention = {"qk_norm": "RMSNorm", "window": 4, "window_layers": [True, False]}
    fields = written(GEMMA3, rope={"base": 50.0}, attention=attention)
    assert (fields["rope_theta"], fields["rope_local_base_freq"]) == (50.0, 50.0)


@pytest.mark.parametrize("family", [GEMMA2, GEMMA3])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_activation": "gelu"}, "hidden_activation must be 'gelu_pytorch_tanh'.*got 'gelu'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention must be False"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a number from 1 to .*; got 0"),
        ({"query_pre_attn_scalar": 10**400}, "query_pre_attn_scalar must be a number from 1"),
        ({"hidden_size": 10**400}, "hidden_size must be a number from 1"),
        ({"hidden_size": -4}, "hidden_size must be a number from 1 to .*; got -4"),
        ({"num_hidden_layers": 10**12, "layer_types": None}, "num_layers: Input should be less than or equal to 10000"),
        ({"layer_types": [LOCAL]}, "layer_types must be sliding_attention or full_attention for each of"),
        ({"sliding_window": None}, "need a window, but config.json does not enable one"),
        ({"mlp_bias": True}, "mlp_bias .* is a field that Megalith does not know"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type must be one of .*got 'dynamic'"),
    ],
)
def test_what_our_model_lacks_is_refused_by_field(family, fields, message):
    theirs = peers.gemma2() if family is GEMMA2 else peers.gemma3()
    with pytest.raises(ConfigError, match=message):
        family.config_from_hf(theirs.config.to_dict() | fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be null"),
        ({"sliding_window_pattern": 0, "layer_types": None}, "sliding_window_pattern must be at least 1; got 0"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters must have an object for full_attention"),
        ({"rope_parameters": {LOCAL: 7}}, "rope_parameters must have an object for full_attention"),
        (
            {"rope_parameters": {LOCAL: {"rope_type": "linear", "factor": 2.0}}},
            "rope_parameters.sliding_attention must have rope_type 'default'; got 'linear'",
        ),
        ({"rope_local_base_freq": 7.0}, r"the rotary bases \(rope_theta\) differ"),
    ],
)
def test_what_gemma_3_lacks_is_refused_by_field(fields, message):
    with pytest.raises(ConfigError, match=message):
        GEMMA3.config_from_hf(peers.gemma3().config.to_dict() | fields)


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        (GEMMA2, {"multipliers": {}}, "multipliers.embedding must be 4.0; got 1.0"),
        (GEMMA2, {"residual": {"zero_centered_norm": True}}, "residual.norm_placement must be 'sandwich'; got 'pre'"),
        (GEMMA2, {"residual": {"norm_placement": "sandwich"}}, "residual.zero_centered_norm must be True; got False"),
        (GEMMA2, {"activation": "swiglu"}, "activation must be 'geglu_tanh'; got 'swiglu'"),
        (GEMMA2, {"attention": {"scale": 0.3}}, "attention.scale must be None or 0.30151134457776363; got 0.3"),
        (GEMMA2, {"attention": {"scale": 1e-200}}, "attention.scale must be None or .*; got 1e-200"),
        (GEMMA2, {"attention": {"scale": 3.0}}, "attention.scale must be None or 1.0; got 3.0"),
        (GEMMA2, {"attention": {"qk_norm": "RMSNorm"}}, "attention.qk_norm must be None; got 'RMSNorm'"),
        (GEMMA2, {"attention": {"window": 4}, "rope": {"local_base": 5.0}}, "rope.local_base must be None; got 5.0"),
        (GEMMA3, {}, "attention.qk_norm must be 'RMSNorm'; got None"),
        (
            GEMMA3,
            {"attention": {"qk_norm": "RMSNorm", "logit_softcap": 5.0}},
            "attention.logit_softcap must be None; got 5.0",
        ),
        (
            GEMMA3,
            {
                "attention": {"qk_norm": "RMSNorm", "window": 4},
                "rope": {"scaling": {"type": "linear", "factor": 2.0}},
            },
            "rope.scaling must be None; got",
        ),
    ],
)
def test_what_a_family_lacks_is_not_written_as_one(family, settings, message):
    with pytest.raises(ConfigError, match=message):
        written(family, **settings)
