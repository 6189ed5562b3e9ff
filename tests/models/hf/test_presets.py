"""Presets of mixtures of experts: the shape of each published config.json, and its published number of parameters."""

import pytest
import torch

from megalith.config import TransformerConfig, load_run, preset_names
from megalith.models.gpt_model import GPTModel
from megalith.models.hf.families import detect
from megalith.training.tasks.gpt_size import expert_parameters, parameters
from tests.models.hf.published_experts import PUBLISHED
from tests.transformer.shapes import options


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_has_the_shape_of_the_published_config(name):
    published = PUBLISHED[name]
    family = detect(published)
    ours = TransformerConfig(preset=name, vocab_size=published["vocab_size"])
    found, wanted = (
        family.config_to_hf(
            config,
            max_position_embeddings=published["max_position_embeddings"],
            dtype="bfloat16",
            eos_token_id=published["eos_token_id"],
        )
        for config in (ours, family.config_from_hf(published))
    )
    assert found == wanted
    read = {field: value for field, value in published.items() if field in found and not field.startswith("rope_")}
    read.pop("bos_token_id", None)  # of their tokenizer
    read.pop("num_nextn_predict_layers", None)  # of modules that the preset leaves out
    assert {field: found[field] for field in read} == read


# billions, from papers and model cards: total, active, and whether active excludes the embedding
COUNTS = {
    "mixtral-8x7b": (46.7, 12.9, False),
    "qwen3-30b-a3b": (30.5, 3.3, False),
    "deepseek-v3": (671, 37, False),
    "deepseek-v2-lite": (15.7, 2.4, True),
    "gpt-oss-20b": (20.9, 3.6, True),
}


@pytest.mark.parametrize("name", COUNTS)
def test_it_has_the_published_number_of_parameters_and_of_active_ones(name):
    total, active, without_embedding = COUNTS[name]
    V = PUBLISHED[name]["vocab_size"]
    config = TransformerConfig(preset=name, vocab_size=V)
    with torch.device("meta"):
        model = GPTModel(config, options(dtype=torch.bfloat16))
    counted, of_experts = parameters(config, V), expert_parameters(config, V)
    assert model.num_parameters() == counted
    of_token = counted - of_experts + of_experts * config.moe.top_k // config.moe.num_experts
    of_token -= without_embedding * V * config.hidden_size
    digits = 0 if name == "deepseek-v3" else 1
    assert round(counted / 1e9, digits) == total
    # they round down: 3.35 is given as 3.3, 37.6 as 37 and 2.45 as 2.4
    assert active <= of_token / 1e9 < active + 10**-digits or round(of_token / 1e9, 1) == active


def test_modules_of_multi_token_prediction_beside_a_preset_have_experts():
    with_module = TransformerConfig(preset="deepseek-v3", mtp={"num_modules": 1})
    assert with_module.moe.has_experts(61)
    assert not with_module.moe.has_experts(2)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_run_of_it_can_be_started_by_its_name(name):
    tree = {
        "model": {"preset": name},
        "data": {"train": "corpus", "seq_length": 4096},
        "train": {"steps": 100, "global_batch_size": 16, "micro_batch_size": 1},
        "optim": {"lr": 1e-3},
        "parallel": {"expert": 8},
    }
    assert load_run(tree, world_size=8).model.moe == TransformerConfig(preset=name).moe
    assert name in preset_names()
