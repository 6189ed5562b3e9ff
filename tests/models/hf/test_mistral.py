"""models/hf/mistral: defaults and refusals; test_parity compares numbers."""

import pytest
from transformers import MistralConfig

from megalith.config import TransformerConfig
from megalith.errors import ConfigError
from megalith.models.hf import LLAMA, MISTRAL, fitting
from tests.models.hf import peers


def test_without_a_window_it_is_a_llama():
    theirs = peers.mistral(sliding_window=None)
    peers.assert_same_function(theirs, MISTRAL)
    config = MISTRAL.config_from_hf(theirs.config.to_dict())
    exported = MISTRAL.config_to_hf(config, max_position_embeddings=2048, dtype="float32", eos_token_id=7)
    assert exported["sliding_window"] is None
    assert MISTRAL.config_from_hf(exported) == config
    assert fitting(config) == LLAMA


def test_absent_fields_have_the_defaults_of_transformers_and_nulls_are_not_absent():
    required = {name: peers.LLAMA[name] for name in MISTRAL.sizes} | {"hidden_size": 64, "num_attention_heads": 16}
    bare = {"model_type": "mistral", **required}
    assert MISTRAL.config_from_hf(bare) == MISTRAL.config_from_hf(MistralConfig(**required).to_dict())
    config = MISTRAL.config_from_hf(bare)
    assert (config.num_query_groups, config.attention.window) == (8, 4096)
    nulls = {"num_key_value_heads": None, "sliding_window": None}
    of_nulls = MISTRAL.config_from_hf(bare | nulls)
    assert (of_nulls.num_query_groups, of_nulls.attention.window) == (16, None)
    # transformers 4 reads null as one group per head; transformers 5 refuses it
    theirs = MistralConfig(**required, num_key_value_heads=16, sliding_window=None)
    assert of_nulls == MISTRAL.config_from_hf(theirs.to_dict())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention_bias": True}, r"attention_bias \(True\) is a field that Megalith does not know"),
        ({"layer_types": ["full_attention"]}, "layer_types .* is a field that Megalith does not know"),
        ({"sliding_window": "4"}, r"sliding_window must be an integer; got '4'"),
        ({"sliding_window": 0}, r"attention.window: Input should be greater than or equal to 1"),
        ({"rope_scaling": {"type": "longrope"}}, r"rope_type must be one of .*got 'longrope'"),
    ],
)
def test_what_our_model_lacks_is_refused_by_field(fields, message):
    with pytest.raises(ConfigError, match=message):
        MISTRAL.config_from_hf(peers.mistral().config.to_dict() | fields)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"add_bias_linear": True}, "add_bias_linear must be False; got True"),
        ({"attention": {"window": 4, "window_layers": [True, False]}}, r"attention.window_layers must be None"),
        ({"attention": {"window": 4}, "rope": {"local_base": 5.0}}, r"rope.local_base must be None; got 5.0"),
    ],
)
def test_what_mistral_lacks_is_not_written_as_one(settings, message):
    model = TransformerConfig(vocab_size=8, num_layers=1, hidden_size=8, num_attention_heads=2, **settings)
    with pytest.raises(ConfigError, match=message):
        MISTRAL.require(model)
