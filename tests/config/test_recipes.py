"""Shipped recipes and presets: every recipe is valid, and every preset has its paper's number of parameters."""

import pytest

from megalith.config import TransformerConfig, load_run, preset_names, recipe_names


@pytest.mark.parametrize("recipe", recipe_names())
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_a_recipe_runs_on_one_to_eight_ranks(recipe, world_size):
    config = load_run(recipe, ["data.train=corpus"], world_size=world_size)
    assert config.run == f"runs/{recipe}"
    assert config.model.preset == {"classification-tiny": "bert-tiny", "embedding-tiny": "bert-tiny"}.get(
        recipe, recipe
    )
    assert config.data.train == "corpus"


def test_there_are_recipes_to_begin_with():
    of_encoders = {"bert-tiny", "classification-tiny", "embedding-tiny", "t5-tiny"}
    assert {"llama-4m", "llama-28m", "gpt2-124m", "moe-tiny", *of_encoders} == set(recipe_names())


# as published in the model cards and with GPT-2's released checkpoints; ours by hand
@pytest.mark.parametrize(
    ("preset", "vocab_size", "parameters"),
    [
        ("llama2-7b", 32_000, 6_738_415_616),
        ("llama3-8b", 128_256, 8_030_261_248),
        ("tinyllama-1.1b", 32_000, 1_100_048_384),
        ("gpt2-124m", 50_257, 124_439_808),
        ("gpt2-1.5b", 50_257, 1_557_611_200),
        ("llama-28m", 8_192, 27_662_848),
        ("llama-4m", 2_048, 4_000_000),
        ("moe-tiny", 2_048, 10_496_256),
        ("bert-110m", 30_522, 110_106_428),
        ("bert-tiny", 2_048, 3_950_082),
    ],
)
def test_a_preset_has_the_published_number_of_parameters(preset, vocab_size, parameters):
    model = TransformerConfig(preset=preset)
    hidden, ffn, size = model.hidden_size, model.ffn_hidden_size, model.kv_channels
    heads, groups = model.num_attention_heads * size, model.num_query_groups * size
    if model.moe is not None:
        assert model.moe.ffn_hidden_size is not None
        ffn = model.moe.num_experts * model.moe.ffn_hidden_size
    weights = 2 * hidden * heads + 2 * hidden * groups + (3 if model.activation == "swiglu" else 2) * hidden * ffn
    weights += 0 if model.moe is None else model.moe.num_experts * hidden
    biases = heads + 2 * groups + hidden + ffn + hidden if model.add_bias_linear else 0
    norm = hidden * (2 if model.normalization == "LayerNorm" else 1)
    embeddings = (vocab_size * (1 if model.tie_word_embeddings else 2) + (model.max_position_embeddings or 0)) * hidden
    # token types, the masked-token transform with its norm, a vocabulary bias, the pooler, two classes
    encoder = 2 * hidden + (hidden**2 + hidden + norm) + vocab_size + (hidden**2 + hidden) + 2 * hidden + 2
    outside = norm + embeddings + (0 if model.bert is None else encoder)
    assert model.num_layers * (weights + biases + 2 * norm) + outside == parameters


def test_every_preset_is_counted_above():
    assert len(preset_names()) == 16  # t5-tiny is counted below, five with experts in tests/models/hf/test_presets.py


def test_the_preset_of_a_t5_has_two_stacks():
    model, vocab_size = TransformerConfig(preset="t5-tiny"), 2_048
    H, F = model.hidden_size, model.ffn_hidden_size
    assert model.t5 is not None
    encoder = model.num_layers * (4 * H * H + 3 * H * F + 2 * H) + H + 32 * model.num_attention_heads
    decoder = model.t5.num_decoder_layers * (8 * H * H + 3 * H * F + 3 * H) + H + 32 * model.num_attention_heads
    assert encoder + decoder + 2 * vocab_size * H == 4_197_632
