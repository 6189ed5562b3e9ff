"""models/hf/qwen: defaults, windows and refusals; test_parity compares numbers."""

import pytest

from megalith.config import TransformerConfig
from megalith.errors import CheckpointError, ConfigError
from megalith.models.hf import LLAMA, QWEN2, QWEN3
from tests.models.hf import peers

of_peers = pytest.mark.parametrize("peer", [peers.PEERS["qwen2"], peers.PEERS["qwen3"]], ids=["qwen2", "qwen3"])


@of_peers
def test_absent_fields_have_the_defaults_of_transformers(peer):
    sizes = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2}
    required = {**sizes, "num_attention_heads": 32}
    bare = {"model_type": peer.family.model_type, **required}
    assert peer.family.config_from_hf(bare) == peer.family.config_from_hf(peer.config(**required).to_dict())


@of_peers
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "need a window, but config.json does not enable one",
        ),
        (
            {"use_sliding_window": True, "sliding_window": None, "layer_types": ["sliding_attention"] * 2},
            "need a window, but config.json does not enable one",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types must be .* for each of 2 layers; got"),
        ({"layer_types": ["full_attention", ["chunked_attention"]]}, "layer_types must be .* for each of 2 layers"),
        (
            {"use_sliding_window": True, "layer_types": None, "sliding_window": 0, "max_window_layers": 0},
            "attention.window: Input should be",
        ),
        ({"layer_types": "full_attention"}, "layer_types must be a list; got 'full_attention'"),
        ({"mlp_bias": True}, "mlp_bias .* is a field that Megalith does not know"),
        ({"hidden_act": "relu"}, "hidden_act must be 'silu'"),
    ],
)
def test_what_our_model_lacks_is_refused_by_field(peer, fields, message):
    with pytest.raises(ConfigError, match=message):
        peer.family.config_from_hf(peer.build().config.to_dict() | fields)


def test_a_window_that_is_switched_off_is_none():
    fields = {"sliding_window": 4096, "max_window_layers": 21, "use_sliding_window": False}
    config = peers.qwen2().config.to_dict()
    assert QWEN2.config_from_hf(config | fields) == QWEN2.config_from_hf(config)


@of_peers
def test_the_first_layer_with_a_window_is_what_transformers_before_layer_types_reads(peer):
    fields = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2, "num_hidden_layers": 5}
    new = peer.build(**fields).config.to_dict()
    old = {name: value for name, value in new.items() if name != "layer_types"}
    config = peer.family.config_from_hf(old)
    assert config == peer.family.config_from_hf(new)
    assert config.attention.window_layers == (False, False, True, True, True)
    written = peer.family.config_to_hf(config, max_position_embeddings=16, dtype="float32", eos_token_id=None)
    assert {name: written[name] for name in fields} == fields


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        (LLAMA, {"qkv_bias": True}, r"qkv_bias must be False; got True"),
        (LLAMA, {"qk_norm": "RMSNorm"}, r"attention.qk_norm must be None; got 'RMSNorm'"),
        (QWEN2, {"qkv_bias": True, "softmax": "learnable"}, r"attention.softmax must be 'vanilla'; got 'learnable'"),
        (QWEN2, {}, r"qkv_bias must be True; got False"),
        (QWEN3, {"qk_norm": "L2"}, r"attention.qk_norm must be 'RMSNorm'; got 'L2'"),
        (QWEN3, {"qk_norm": "RMSNorm", "qkv_bias": True}, r"output_bias must be True; got False"),
        (QWEN3, {"qk_norm": "RMSNorm", "scale": 0.1}, r"attention.scale must be None; got 0.1"),
        (QWEN3, {"qk_norm": "RMSNorm", "logit_softcap": 5.0}, r"attention.logit_softcap must be None; got 5.0"),
        (QWEN3, {"qk_norm": "RMSNorm", "output_gate": True}, r"attention.output_gate must be False; got True"),
    ],
)
def test_what_a_family_lacks_is_not_written_as_one(family, settings, message):
    model = TransformerConfig(vocab_size=8, num_layers=1, hidden_size=8, num_attention_heads=2, attention=settings)
    with pytest.raises(ConfigError, match=message):
        family.require(model)


def test_a_missing_norm_is_named():
    theirs = peers.qwen3()
    state, config = theirs.state_dict(), QWEN3.config_from_hf(theirs.config.to_dict())
    del state["model.layers.1.self_attn.k_norm.weight"]
    with pytest.raises(CheckpointError, match=r"missing: model.layers.1.self_attn.k_norm.weight"):
        QWEN3.from_hf(state, config)
