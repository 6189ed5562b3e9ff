"""models/hf/llama: transformers' own Llama is the judge of names, shapes, defaults and numbers."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megalith.config import TransformerConfig
from megalith.errors import CheckpointError, ConfigError
from megalith.models.hf import LLAMA
from tests.models.hf import peers

SHAPES = {
    "grouped-query, untied": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "biases of attention alone": {"attention_bias": True},
    "biases of the mlp alone": {"mlp_bias": True},
    "heads wider than hidden / heads": {"head_dim": 16},
    "one key and value for all heads": {"num_key_value_heads": 1},
}
REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
def test_tensors_come_back_bitwise(fields):
    theirs = peers.llama(**fields).bfloat16().state_dict()
    config = LLAMA.config_from_hf(peers.llama(**fields).config.to_dict())
    peers.assert_bitwise(LLAMA.to_hf(LLAMA.from_hf(theirs, config), config), theirs)


@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
def test_logits_and_gradients_are_theirs(fields):
    peers.assert_same_function(peers.llama(**fields), LLAMA)


def test_another_rotary_base_changes_their_logits_and_ours_alike():
    peers.assert_same_function(peers.llama(rope_parameters={"rope_type": "default", "rope_theta": 500.0}), LLAMA)


@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
def test_config_comes_back_and_builds_their_model(fields):
    theirs = peers.llama(**fields)
    config = LLAMA.config_from_hf(theirs.config.to_dict())
    exported = LLAMA.config_to_hf(config, max_position_embeddings=2048, dtype="float32", eos_token_id=7)
    assert LLAMA.config_from_hf(exported) == config
    again = LlamaForCausalLM(LlamaConfig(**exported))
    again.load_state_dict(LLAMA.to_hf(LLAMA.from_hf(theirs.state_dict(), config), config))
    tokens = torch.arange(20).view(1, 20)
    assert torch.equal(again(tokens).logits, theirs(tokens).logits)
    assert again.config.eos_token_id == 7
    assert again.config.bos_token_id is None


def test_absent_fields_have_the_defaults_of_transformers():
    bare = {"model_type": "llama"} | {name: peers.LLAMA[name] for name in REQUIRED}
    full = LlamaConfig(**{name: peers.LLAMA[name] for name in REQUIRED}).to_dict()
    assert LLAMA.config_from_hf(bare) == LLAMA.config_from_hf(full)


def test_a_config_of_transformers_4_reads_as_one_of_5():
    new = LlamaConfig(**peers.LLAMA, rope_parameters={"rope_type": "default", "rope_theta": 5e5}).to_dict()
    old = {name: value for name, value in new.items() if name != "rope_parameters"}
    old |= {"rope_theta": 5e5, "rope_scaling": None, "torch_dtype": "float32"}
    assert LLAMA.config_from_hf(old) == LLAMA.config_from_hf(new)
    assert LLAMA.config_from_hf(old).rope.base == 5e5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, r"rope_scaling must be absent.*'llama3'.*factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_theta": 5e5}, r"differ: {'rope_theta': 500000.0, 'rope_parameters.rope_theta': 10000.0}"),
        ({"hidden_act": "relu"}, r"hidden_act must be 'silu'.*got 'relu'"),
        ({"sliding_window": 4096}, r"sliding_window \(4096\) is a field that our model does not know"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"model_type": "mistral"}, r"model_type 'llama'; got 'mistral'"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder must be False"),
        ({"hidden_size": None}, r"must have hidden_size; it does not"),
        ({"hidden_size": {}}, r"hidden_size must be a whole number; got \{\}"),
        ({"hidden_act": ["silu"]}, r"hidden_act must be text; got \['silu'\]"),
        ({"mlp_bias": 1}, r"mlp_bias must be true or false; got 1"),
        ({"rope_parameters": [1]}, r"rope_parameters must be an object; got \[1\]"),
        ({"rope_theta": "x"}, r"rope_theta must be a number; got 'x'"),
        ({"rope_parameters": {"rope_theta": [1]}}, r"rope_parameters.rope_theta must be a number; got \[1\]"),
        ({"rope_parameters": {"rope_theta": 10**400}}, r"rope_theta must be below 2\^63"),
        ({"num_hidden_layers": 10**8}, r"num_layers: Input should be less than or equal to 10000"),
        ({"num_hidden_layers": "two"}, r"num_hidden_layers must be a whole number; got 'two'"),
        ({"num_attention_heads": 5}, r"num_attention_heads \(5\) must be divisible by model.num_query_groups \(2\)"),
    ],
)
def test_what_our_model_lacks_is_refused_by_field(fields, message):
    with pytest.raises(ConfigError, match=message):
        LLAMA.config_from_hf(LlamaConfig(**peers.LLAMA).to_dict() | fields)


def test_every_refusal_is_in_one_message():
    fields = LlamaConfig(**peers.LLAMA).to_dict() | {"hidden_act": "relu", "mlp_bias": 1, "sliding_window": 8}
    with pytest.raises(ConfigError, match=r"(?s)hidden_act.*mlp_bias.*sliding_window"):
        LLAMA.config_from_hf(fields)


def test_a_model_that_is_no_llama_is_not_written_as_one():
    gpt = TransformerConfig(
        vocab_size=8, num_layers=1, hidden_size=8, num_attention_heads=2, normalization="LayerNorm", hidden_dropout=0.1
    )
    with pytest.raises(ConfigError, match=r"(?s)normalization must be 'RMSNorm'; got 'LayerNorm'.*hidden_dropout"):
        LLAMA.config_to_hf(gpt, max_position_embeddings=8, dtype="float32", eos_token_id=None)
    with pytest.raises(ConfigError, match="LlamaForCausalLM cannot represent"):
        LLAMA.to_hf({}, gpt)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("activation", "geglu"),
        ("glu", {"clamp": 7.0}),
        ("glu", {"offset": 1.0}),
        ("residual", {"norm_placement": "sandwich"}),
        ("residual", {"zero_centered_norm": True}),
        ("residual", {"embedding_dropout": 0.1}),
        ("multipliers", {"embedding": 2.0}),
        ("multipliers", {"residual": 2.0}),
        ("multipliers", {"logits": 2.0}),
        ("multipliers", {"logit_softcap": 2.0}),
    ],
)
def test_what_changes_the_network_and_no_llama_has_is_not_written(setting, value):
    shape = {"vocab_size": 8, "num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    LLAMA.require(TransformerConfig(**shape, residual={"fp32": True}))  # the same function
    field = next(iter(value)) if isinstance(value, dict) else setting
    with pytest.raises(ConfigError, match=rf"{field} must be .*; got"):
        LLAMA.require(TransformerConfig(**shape, **{setting: value}))


def test_every_tensor_that_does_not_fit_is_listed():
    theirs = peers.llama()
    config = LLAMA.config_from_hf(theirs.config.to_dict())
    state = theirs.state_dict()
    del state["model.norm.weight"]
    state |= {
        "model.layers.0.mlp.gate_proj.weight": torch.ones(3),
        "model.layers.0.self_attn.q_norm.weight": torch.ones(8),
    }
    with pytest.raises(
        CheckpointError,
        match=r"(?s)missing: model\.norm\.weight.*unexpected: model\.layers\.0\.self_attn\.q_norm\.weight"
        r".*gate_proj\.weight must be \[48, 32\]; got \[3\]",
    ):
        LLAMA.from_hf(state, config)


def test_rotary_buffers_of_old_files_are_ignored():
    theirs = peers.llama()
    config = LLAMA.config_from_hf(theirs.config.to_dict())
    old = theirs.state_dict() | {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    peers.assert_bitwise(LLAMA.from_hf(old, config), theirs.state_dict())


def test_a_head_that_is_not_the_embedding_it_is_tied_to_is_refused():
    theirs = peers.llama(tie_word_embeddings=True)
    config = LLAMA.config_from_hf(theirs.config.to_dict())
    state = theirs.state_dict()
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    with pytest.raises(CheckpointError, match=r"lm_head\.weight must equal model\.embed_tokens\.weight"):
        LLAMA.from_hf(state, config)
