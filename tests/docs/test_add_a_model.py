"""docs/add_a_model.md: the block runs, and the family it adds matches transformers."""

import pytest
import torch
from transformers import GraniteConfig, GraniteForCausalLM

from megalith.config import TransformerConfig
from megalith.errors import ConfigError
from megalith.models.hf import Family
from tests.docs.pages import python_blocks
from tests.models.hf import peers

FACTORS = {"embedding_multiplier": 3.0, "residual_multiplier": 0.25, "attention_multiplier": 0.5, "logits_scaling": 2.0}
MODEL = {"vocab_size": 8, "num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def granite() -> Family:
    [source] = python_blocks("add_a_model.md")
    assert len([line for line in source.splitlines() if line.strip()]) < 80
    names: dict[str, Family] = {}
    exec(compile(source, "docs/add_a_model.md", "exec"), names)
    return names["GRANITE"]


def theirs(**fields):
    return peers.randomized(GraniteForCausalLM(GraniteConfig(**peers.LLAMA | FACTORS | fields)))


@pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}])
def test_the_family_on_the_page_computes_what_transformers_does_and_goes_back_to_the_bit(granite, fields):
    model = theirs(**fields)
    peers.assert_same_function(model, granite)
    config = granite.config_from_hf(model.config.to_dict())
    state = granite.to_hf(granite.from_hf(model.state_dict(), config), config)
    peers.assert_bitwise(state, model.state_dict())
    written = granite.config_to_hf(config, max_position_embeddings=2048, dtype="float32", eos_token_id=None)
    assert granite.config_from_hf(written) == config
    again = GraniteForCausalLM(GraniteConfig(**written))
    again.load_state_dict(state)
    tokens = torch.arange(20).view(1, 20)
    assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_absent_fields_have_the_defaults_of_transformers(granite):
    required = {name: peers.LLAMA[name] for name in granite.sizes}
    bare = granite.config_from_hf({"model_type": "granite", **required})
    assert bare == granite.config_from_hf(GraniteConfig(**required).to_dict())


def test_what_granite_lacks_is_refused_in_both_directions(granite):
    with pytest.raises(
        ConfigError, match=r"(?s)logits_scaling must be positive; got 0.0.*sliding_window \(4\) is a field"
    ):
        granite.config_from_hf(theirs().config.to_dict() | {"logits_scaling": 0.0, "sliding_window": 4})
    granite.require(TransformerConfig(**MODEL, multipliers={"logits": 0.5}))
    for settings in ({"attention": {"window": 4}}, {"multipliers": {"logit_softcap": 5.0}}, {"kv_channels": 16}):
        with pytest.raises(ConfigError, match="GraniteForCausalLM cannot represent this model"):
            granite.require(TransformerConfig(**MODEL, **settings))
