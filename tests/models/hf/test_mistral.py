"""models/hf/mistral: transformers' own Mistral is the judge of names, shapes, defaults and numbers."""

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from megalith.config import TransformerConfig
from megalith.errors import ConfigError
from megalith.models.generation import generate
from megalith.models.hf import LLAMA, MISTRAL, detect, fitting
from megalith.models.sampling import Sampling
from tests.models.hf import peers

SHAPES = {
    "a window, untied": {},
    "no window": {"sliding_window": None},
    "tied, one key and value for all heads": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "odd sizes": {"hidden_size": 30, "num_attention_heads": 3, "num_key_value_heads": 3, "sliding_window": 1},
    "rope scaling: yarn": peers.scaled("yarn"),
}
of_shapes = pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)


@of_shapes
def test_tensors_come_back_bitwise(fields):
    theirs = peers.mistral(**fields)
    state, config = theirs.bfloat16().state_dict(), MISTRAL.config_from_hf(theirs.config.to_dict())
    peers.assert_bitwise(MISTRAL.to_hf(MISTRAL.from_hf(state, config), config), state)


@of_shapes
def test_logits_and_gradients_are_theirs(fields):
    peers.assert_same_function(peers.mistral(**fields), MISTRAL)


@of_shapes
def test_config_comes_back_and_builds_their_model(fields):
    theirs = peers.mistral(**fields)
    config = MISTRAL.config_from_hf(theirs.config.to_dict())
    exported = MISTRAL.config_to_hf(config, max_position_embeddings=2048, dtype="float32", eos_token_id=7)
    assert detect(exported) == MISTRAL
    assert MISTRAL.config_from_hf(exported) == config
    assert fitting(config) == (MISTRAL if config.attention.window else LLAMA)
    again = MistralForCausalLM(MistralConfig(**exported))
    again.load_state_dict(MISTRAL.to_hf(MISTRAL.from_hf(theirs.state_dict(), config), config))
    tokens = torch.arange(20).view(1, 20)
    assert torch.equal(again(tokens).logits, theirs(tokens).logits)


def test_greedy_decoding_with_and_without_a_cache_is_theirs_token_for_token():
    theirs = peers.mistral().eval()
    ours = peers.same_as_ours(theirs, MISTRAL).eval()
    prompt = [3, 1, 4, 1, 5]
    want = theirs.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)[0].tolist()
    [cached] = generate(ours, [prompt], 12, sampling=Sampling(temperature=0.0))
    assert [*prompt, *cached] == want
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(12):
            tokens = torch.cat((tokens, ours(tokens)[:, -1:].argmax(dim=-1)), dim=1)
    assert tokens[0].tolist() == want


def test_absent_fields_have_the_defaults_of_transformers_and_nulls_are_not_absent():
    required = {name: peers.LLAMA[name] for name in MISTRAL.sizes} | {"hidden_size": 64, "num_attention_heads": 16}
    bare = {"model_type": "mistral", **required}
    assert MISTRAL.config_from_hf(bare) == MISTRAL.config_from_hf(MistralConfig(**required).to_dict())
    config = MISTRAL.config_from_hf(bare)
    assert (config.num_query_groups, config.attention.window) == (8, 4096)
    nulls = {"num_key_value_heads": None, "sliding_window": None}
    of_nulls = MISTRAL.config_from_hf(bare | nulls)
    assert (of_nulls.num_query_groups, of_nulls.attention.window) == (16, None)
    # transformers 4 takes a null for as many groups as heads, and transformers 5 refuses it
    theirs = MistralConfig(**required, num_key_value_heads=16, sliding_window=None)
    assert of_nulls == MISTRAL.config_from_hf(theirs.to_dict())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention_bias": True}, r"attention_bias \(True\) is a field that our model does not know"),
        ({"layer_types": ["full_attention"]}, "layer_types .* is a field that our model does not know"),
        ({"sliding_window": "4"}, r"sliding_window must be a whole number; got '4'"),
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
