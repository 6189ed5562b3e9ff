"""models/hf/llama: names, shapes, defaults and numbers against transformers' Llama."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megalith.config import TransformerConfig
from megalith.errors import CheckpointError, ConfigError
from megalith.models.gpt_model import GPTModel
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
    **{f"rope scaling: {name}": peers.scaled(name) for name in peers.ROPE_SCALINGS},
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


def test_biases_of_attention_without_a_word_on_the_mlp_are_of_attention_alone():
    theirs = peers.llama(attention_bias=True)
    hf_config = theirs.config.to_dict()
    del hf_config["mlp_bias"]  # which configs of older transformers versions lack
    config = LLAMA.config_from_hf(hf_config)
    ours = GPTModel(config)
    ours.load_state_dict(LLAMA.from_hf(theirs.state_dict(), config))
    biases = {name.split(".", 3)[3] for name, _ in ours.named_parameters() if name.endswith(".bias")}
    assert biases == {f"self_attn.{which}_proj.bias" for which in "qkvo"}
    tokens = torch.arange(20).view(1, 20)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)


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


@pytest.mark.parametrize("name", peers.ROPE_SCALINGS)
def test_the_rope_scaling_of_transformers_4_reads_as_that_of_5(name):
    new = LlamaConfig(**peers.LLAMA | peers.scaled(name)).to_dict()
    rope = {key: value for key, value in new["rope_parameters"].items() if key != "rope_theta"}
    old = {field: value for field, value in new.items() if field != "rope_parameters"}
    old |= {"rope_theta": 100.0, "rope_scaling": {"type": rope.pop("rope_type"), **rope}}
    assert LLAMA.config_from_hf(old) == LLAMA.config_from_hf(new)
    assert LLAMA.config_from_hf(old).rope.scaling.factor == rope["factor"]


def test_both_names_of_rope_scaling_are_written_for_both_versions():
    config = LLAMA.config_from_hf(LlamaConfig(**peers.LLAMA | peers.scaled("llama3")).to_dict())
    written = LLAMA.config_to_hf(config, max_position_embeddings=16, dtype="float32", eos_token_id=None)
    assert written["rope_scaling"] == peers.ROPE_SCALINGS["llama3"]
    assert written["rope_parameters"] == {**written["rope_scaling"], "rope_theta": 100.0}
    assert (written["rope_theta"], written["max_position_embeddings"]) == (100.0, 512)


def test_the_length_before_yarn_is_by_default_the_longest_row_as_in_transformers():
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0}
    peers.assert_same_function(peers.llama(rope_parameters=rope, max_position_embeddings=16), LLAMA)


def test_mscale_counts_with_its_other_half_and_without_an_attention_factor_as_in_transformers():
    yarn = peers.ROPE_SCALINGS["yarn"]
    for more in ({"mscale": 2.0}, {"mscale": 2.0, "mscale_all_dim": 1.0, "attention_factor": 1.1}):
        rope = {**yarn, **more, "rope_theta": 100.0}
        peers.assert_same_function(peers.llama(rope_parameters=rope, max_position_embeddings=64), LLAMA)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope": {"percent": 0.5}}, r"rope.percent must be 1.0; got 0.5"),
        ({"rope": {"interleaved": True}}, r"rope.interleaved must be False; got True"),
        ({"rope": {"layers": [True, False]}}, r"rope.layers must be None; got \(True, False\)"),
        ({"rope": {"sections": [2, 1, 1]}}, r"rope.sections must be None; got \(2, 1, 1\)"),
        ({"attention": {"window": 4}}, r"attention.window must be None; got 4"),
    ],
)
def test_positions_and_windows_that_llama_lacks_are_not_written_as_one(settings, message):
    model = TransformerConfig(vocab_size=8, num_layers=1, hidden_size=16, num_attention_heads=2, **settings)
    with pytest.raises(ConfigError, match=message):
        LLAMA.config_to_hf(model, max_position_embeddings=8, dtype="float32", eos_token_id=None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            r"rope_type must be one of default, .*yarn; got 'dynamic'",
        ),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, r"rope_type must be one of .*got \['yarn'\]"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            r"lacks required fields: low_freq_factor, high_freq_factor",
        ),
        (
            {"rope_scaling": {"rope_type": "linear"}},
            r"rope_scaling with rope_type 'linear' lacks required fields: factor",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 1}},
            "has fields that Megalith does not know: beta_fast",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "rope_scaling and rope_parameters must agree",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": "2"}},
            r"rope.scaling.factor: Input should be a valid n",
        ),
        ({"rope_parameters": {"rope_type": "linear", "factor": 10**400}}, r"rope.scaling.factor"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 0.5}},
            r"rope.scaling.factor.* greater than or equal to 1",
        ),
        ({"rope_theta": 5e5}, r"differ: {'rope_theta': 500000.0, 'rope_parameters.rope_theta': 10000.0}"),
        ({"hidden_act": "relu"}, r"hidden_act must be 'silu'.*got 'relu'"),
        ({"sliding_window": 4096}, r"sliding_window \(4096\) is a field that Megalith does not know"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"model_type": "mistral"}, r"model_type 'llama'; got 'mistral'"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder must be False"),
        ({"hidden_size": None}, r"lacks required fields: hidden_size"),
        ({"hidden_size": {}}, r"hidden_size must be an integer; got \{\}"),
        ({"hidden_act": ["silu"]}, r"hidden_act must be a string; got \['silu'\]"),
        ({"mlp_bias": 1}, r"mlp_bias must be true or false; got 1"),
        ({"rope_parameters": [1]}, r"rope_parameters must be an object; got \[1\]"),
        ({"rope_theta": "x"}, r"rope_theta must be a number; got 'x'"),
        ({"rope_parameters": {"rope_theta": [1]}}, r"rope_parameters.rope_theta must be a number; got \[1\]"),
        ({"rope_parameters": {"rope_theta": 10**400}}, r"rope_theta must be below 2\^63"),
        ({"num_hidden_layers": 10**8}, r"num_layers: Input should be less than or equal to 10000"),
        ({"num_hidden_layers": "two"}, r"num_hidden_layers must be an integer; got 'two'"),
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
