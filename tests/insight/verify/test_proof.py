"""A small recipe in a small layout equals one process; a fault is found, with the axes that it needs."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

from megalith.config import load_run
from megalith.insight.verify.proof import Case, Proof
from megalith.insight.verify.record import Key, _ModuleRecorder, record_steps
from megalith.insight.verify.shrink import on_layout, on_one_process
from tests.insight.verify.proofs import GPT2_RECIPE, begin, found_with
from tests.rank_pool import ranks

PARALLEL = {"tensor": 2, "sequence": True, "pipeline": 2, "shard": 1}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Proof:
    recomputing = {**GPT2_RECIPE["train"], "recompute": "full"}
    tree = {**GPT2_RECIPE, "train": recomputing, "parallel": PARALLEL}
    return begin(tree, 4, tmp_path_factory.mktemp("proof"))


def test_the_record_of_one_process_is_in_causal_order(prepared):
    kinds = [(key.step, key.kind) for key in prepared.keys]
    assert list(dict.fromkeys(kinds)) == [
        (0, "weight"),
        *((step, kind) for step in (1, 2) for kind in ("module", "loss", "gradient", "norm")),
        (2, "weight"),
    ]
    modules = [key.name for key in prepared.keys if key[:2] == (1, "module")]
    places = [modules.index(name) for name in (
        "the output of model.embed_tokens",
        "the input of model.layers.0",
        "the output of model.layers.0.self_attn",
        "the input of model.layers.0.mlp",
        "the output of model.layers.0",
        "the input of model.layers.1",
        "the output of model.norm",
        "the loss of each token",
    )]  # fmt: skip
    assert places == sorted(places)
    gradients = [key.name for key in prepared.keys if key[:2] == (1, "gradient")]
    assert gradients[0].startswith("model.norm")
    assert gradients[-1] == "model.embed_tokens.weight"  # tied, and complete when the first layer has its gradient
    after = gradients.index("model.layers.0.mlp.up_proj.weight")
    assert after < gradients.index("model.layers.0.post_attention_layernorm.weight") < len(gradients) - 4


def parts_of_tokens(tree: dict[str, Any]) -> dict[str, list[int]]:
    """The tokens of each module's entry in this rank's record of the first step."""
    record = record_steps(load_run(tree, world_size=torch.distributed.get_world_size()))
    return {key.name: record[key].tokens.tolist() for key in record if key[:2] == (1, "module")}


def test_ranks_record_each_token_once_on_the_residual_stream(prepared):
    tree = on_layout(prepared.small, prepared.config, {"tensor": 2, "pipeline": 2}, "float64")
    [alone] = ranks(1, parts_of_tokens, {**on_one_process(prepared.small), "precision": {"dtype": "float64"}})
    first, second, third, fourth = ranks(4, parts_of_tokens, tree)
    stages = [
        ((first, second), "model.layers.0", "model.layers.1"),
        ((third, fourth), "model.layers.1", "model.layers.0"),
    ]
    for pair, mine, others in stages:
        tokens = [part[f"the output of {mine}.mlp"] for part in pair]
        assert sorted(tokens[0] + tokens[1]) == alone[f"the output of {mine}.mlp"]
        assert not any(name.startswith(f"the output of {others}") for part in pair for name in part)
    assert third["the loss of each token"] == alone["the loss of each token"]


def test_a_small_layout_has_the_numbers_of_one_process(prepared):
    result = prepared.run(Case({"tensor": 2, "pipeline": 2}, "float64", "reference"))
    assert result.same, result
    assert 0.0 < result.error < 1e-10
    assert result.worst.kind != "module"


def test_paths_are_taken_although_tensors_are_small(prepared):
    result = prepared.run(Case({"tensor": 2}, "float64", "blocked"))
    assert result.same, result
    assert "blocked" in result.taken


def test_what_no_rank_has_is_wrong(prepared):
    missing = Key(1, "gradient", "model.layers.9.mlp.up_proj.weight")
    more = Proof(prepared.config, prepared.small, prepared.reference, [*prepared.keys, missing])
    result = more.run(Case({}, "float64", "reference"))
    assert (result.same, result.worst, result.error, result.first) == (
        False,
        missing,
        float("inf"),
        (missing, float("inf")),
    )


def scale_the_output_of_mlp_for_others() -> Any:
    """Hooks of ``mlp`` see a wrong output; its layer computes with the right one."""
    add = _ModuleRecorder._add

    def scaled(self: Any, what: str, x: object) -> None:
        add(self, what, x * 2 if what.endswith("output of model.layers.0.mlp") else x)

    return patch.object(_ModuleRecorder, "_add", scaled)


def test_where_only_a_module_is_off_it_is_what_is_told(prepared):
    result, _ = found_with(scale_the_output_of_mlp_for_others, prepared, Case({"tensor": 2}, "float64", "reference"))
    assert not result.same
    assert result.worst == Key(1, "module", "the output of model.layers.0.mlp")
    assert (result.worst, result.error) == result.first


@pytest.mark.slow
def test_modules_of_multi_token_prediction_are_recorded_and_equal_those_of_one_process(tmp_path):
    model = {**GPT2_RECIPE["model"], "mtp": {"num_modules": 3}}
    proof = begin({**GPT2_RECIPE, "model": model, "parallel": PARALLEL}, 4, tmp_path)
    names = [key.name for key in proof.keys if key[:2] == (1, "module")]
    assert names.index("the output of model.norm") < names.index("the output of model.layers.3")
    result = proof.run(Case({"tensor": 2, "pipeline": 2}, "float64", "reference"))
    assert result.same, result
