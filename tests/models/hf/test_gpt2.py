"""models/hf/gpt2: names, shapes, defaults and numbers against transformers' GPT-2."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from megalith.config import TransformerConfig
from megalith.errors import CheckpointError, ConfigError
from megalith.models.hf import GPT2, fitting
from tests.models.hf import peers

SHAPES = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "another ffn": {"n_inner": 40},
    "exact gelu": {"activation_function": "gelu"},
    "relu": {"activation_function": "relu"},
}
REQUIRED = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")


@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
def test_tensors_come_back_bitwise(fields):
    theirs = peers.gpt2(**fields).bfloat16().state_dict()
    config = GPT2.config_from_hf(peers.gpt2(**fields).config.to_dict())
    peers.assert_bitwise(GPT2.to_hf(GPT2.from_hf(theirs, config), config), theirs)


@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
def test_logits_and_gradients_are_theirs(fields):
    peers.assert_same_function(peers.gpt2(**fields), GPT2)


def test_query_key_and_value_are_the_transposed_thirds_of_c_attn():
    theirs = peers.gpt2()
    ours = GPT2.from_hf(theirs.state_dict(), GPT2.config_from_hf(theirs.config.to_dict()))
    packed = theirs.transformer.h[1].attn.c_attn.weight  # [H, 3H]
    assert torch.equal(ours["model.layers.1.self_attn.k_proj.weight"], packed[:, 32:64].T)


def test_no_two_tensors_share_memory_and_all_are_contiguous():
    theirs = peers.gpt2()
    ours = GPT2.from_hf(theirs.state_dict(), GPT2.config_from_hf(theirs.config.to_dict()))
    assert all(tensor.is_contiguous() for tensor in ours.values())
    assert len({tensor.untyped_storage().data_ptr() for tensor in ours.values()}) == len(ours)


@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
def test_config_comes_back_and_builds_their_model(fields):
    theirs = peers.gpt2(**fields)
    config = GPT2.config_from_hf(theirs.config.to_dict())
    exported = GPT2.config_to_hf(config, max_position_embeddings=24, dtype="float32", eos_token_id=7)
    assert GPT2.config_from_hf(exported) == config
    again = GPT2LMHeadModel(GPT2Config(**exported))
    again.load_state_dict(GPT2.to_hf(GPT2.from_hf(theirs.state_dict(), config), config))
    tokens = torch.arange(20).view(1, 20)
    assert torch.equal(again(tokens).logits, theirs(tokens).logits)


def test_absent_fields_have_the_defaults_of_transformers():
    required = {name: peers.GPT2[name] for name in REQUIRED}
    assert GPT2.config_from_hf({"model_type": "gpt2"} | required) == GPT2.config_from_hf(
        GPT2Config(**required).to_dict()
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"activation_function": "silu"}, r"activation_function must be one of gelu_new.*got 'silu'"),
        ({"scale_attn_weights": False}, "scale_attn_weights must be True"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx must be False"),
        ({"add_cross_attention": True}, "add_cross_attention must be False"),
        ({"multi_query": True}, r"multi_query \(True\) is a field that Megalith does not know"),
        ({"n_layer": None, "n_head": None}, "lacks required fields: n_layer, n_head"),
    ],
)
def test_what_our_model_lacks_is_refused_by_field(fields, message):
    with pytest.raises(ConfigError, match=message):
        GPT2.config_from_hf(GPT2Config(**peers.GPT2).to_dict() | fields)


def test_the_embedding_may_drop_another_share_than_the_residual_stream():
    theirs = GPT2Config(**peers.GPT2 | {"resid_pdrop": 0.2, "embd_pdrop": 0.3})
    config = GPT2.config_from_hf(theirs.to_dict())
    assert (config.hidden_dropout, config.embedding_dropout) == (0.2, 0.3)
    exported = GPT2.config_to_hf(config, max_position_embeddings=24, dtype="float32", eos_token_id=None)
    assert (exported["resid_pdrop"], exported["embd_pdrop"]) == (0.2, 0.3)


def test_it_is_the_family_of_a_model_without_rotary_positions():
    assert fitting(GPT2.config_from_hf(GPT2Config(**peers.GPT2).to_dict())) is GPT2


def test_a_model_that_is_no_gpt2_is_not_written_as_one():
    llama = TransformerConfig(vocab_size=8, num_layers=1, hidden_size=8, num_attention_heads=2, num_query_groups=1)
    with pytest.raises(
        ConfigError, match=r"(?s)normalization.*activation.*add_bias_linear.*num_query_groups must be 2"
    ):
        GPT2.config_to_hf(llama, max_position_embeddings=8, dtype="float32", eos_token_id=None)


def test_masks_of_old_files_are_ignored_and_their_missing_prefix_is_added():
    theirs = peers.gpt2()
    config = GPT2.config_from_hf(theirs.config.to_dict())
    old = theirs.transformer.state_dict() | {
        "h.0.attn.bias": torch.ones(1, 1, 24, 24),
        "h.0.attn.masked_bias": torch.tensor(-1e4),
    }
    peers.assert_bitwise(GPT2.from_hf(old, config), GPT2.from_hf(theirs.state_dict(), config))


def test_every_tensor_that_does_not_fit_is_listed_by_their_names():
    theirs = peers.gpt2()
    config = GPT2.config_from_hf(theirs.config.to_dict())
    state = theirs.state_dict() | {
        "transformer.h.0.attn.c_attn.weight": torch.ones(96, 32),  # transposed by mistake
        "transformer.h.0.crossattention.c_attn.weight": torch.ones(2),
    }
    del state["transformer.wpe.weight"]
    with pytest.raises(
        CheckpointError,
        match=r"(?s)missing: transformer\.wpe\.weight.*unexpected: transformer\.h\.0\.crossattention"
        r".*c_attn\.weight must be \[32, 96\]; got \[96, 32\]",
    ):
        GPT2.from_hf(state, config)
