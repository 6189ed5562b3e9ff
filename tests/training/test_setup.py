"""Settings are applied to the model from outside: recomputation and compilation, layer by layer."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

from megalith.config import load_run
from megalith.errors import ConfigError
from megalith.models.gpt_model import GPTModel
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.parameters import ParameterSpec
from megalith.training.evaluation import evaluate
from megalith.training.setup import RunParts, build_run
from megalith.training.step import local_counts, sum_totals, train_step
from megalith.training.tasks.pretrain_gpt import PretrainGPT
from megalith.training.tasks.task import Task
from megalith.transformer.dot_product_attention import DotProductAttention
from megalith.transformer.layer import TransformerLayer
from megalith.transformer.stage import Stage
from tests.rank_pool import ranks
from tests.tiny_run import settings
from tests.training.plugins import OtherSecondLayer


def forwards(tree: dict[str, Any]) -> tuple[int, int]:
    """How often layers and attention cores ran forward in a step of one micro-batch."""
    counts = {TransformerLayer: 0, DotProductAttention: 0}

    def counted(kind: type) -> Any:
        forward = kind.forward

        def run(self: Any, *args: Any) -> Any:
            counts[kind] += 1
            return forward(self, *args)

        return patch.object(kind, "forward", run)

    with counted(TransformerLayer), counted(DotProductAttention):
        run = build_run(load_run(tree), torch.device("cpu"))
        micro_batches = run.loader.batch(0, 8, 8)
        train_step(run, micro_batches, sum_totals(run, local_counts(run, micro_batches), stop=False).counts)
    return counts[TransformerLayer], counts[DotProductAttention]


# for the two layers: one forward, and another in backward where they are recomputed
@pytest.mark.parametrize(("recompute", "want"), [("none", (2, 2)), ("full", (4, 4)), ("selective", (2, 4))])
def test_recomputation_runs_again_what_the_setting_names(recompute, want, tmp_path):
    tree = settings(tmp_path, train={"micro_batch_size": 8, "recompute": recompute})
    assert ranks(1, forwards, tree) == [want]


class NoCores(OtherSecondLayer):
    """A model with its own attention module."""

    def build_model(self, options: BuildOptions, stage: Stage | None = None) -> Any:
        model = super().build_model(options, stage)
        for layer in model.layers():
            layer.self_attn.core_attention = torch.nn.Identity()
        return model


def refused(tree: dict[str, Any]) -> str:
    config = load_run(tree)
    with pytest.raises(ConfigError) as refusal:
        build_run(config, torch.device("cpu"), RunParts(NoCores(config)))
    return str(refusal.value)


def test_selective_recomputation_of_nothing_is_refused(tmp_path):
    [message] = ranks(1, refused, settings(tmp_path, train={"recompute": "selective"}))
    assert "lists core_attn, but this GPTModel has none; use layernorm, self_attn, mlp, mlp_act" in message


def compiled(tree: dict[str, Any]) -> list[bool]:
    run = build_run(load_run(tree), torch.device("cpu"), RunParts(PretrainGPT(load_run(tree))))
    return [layer._compiled_call_impl is not None for layer in run.chunks[0].layers()]


@pytest.mark.parametrize("on", [True, False])
def test_compilation_is_asked_of_every_layer(on, tmp_path):
    tree = settings(tmp_path, train={"compile": on}, experimental=["compile"] if on else [])
    assert ranks(1, compiled, tree) == [[on, on]]


class NoEnd(PretrainGPT):
    """A model whose last stage cannot be built."""

    def build_model(self, options: BuildOptions, stage: Stage | None = None) -> Any:
        assert stage is not None
        if stage.has_head:
            raise ConfigError("there is no end")
        return super().build_model(options, stage)


def batches_and_inputs(tree: dict[str, Any]) -> tuple[int, int]:
    """The micro-batches of a step and of an evaluation, and how often inputs were made from them."""
    run = build_run(load_run(tree, world_size=2), torch.device("cpu"))
    make, micro_batches = PretrainGPT.inputs, run.loader.batch(0, 8, 2)
    counts = sum_totals(run, local_counts(run, micro_batches), stop=False).counts
    dataset = run.task.evaluation_dataset(tree["data"]["train"])
    with patch.object(PretrainGPT, "inputs", autospec=True, side_effect=make) as inputs:
        train_step(run, micro_batches, counts)
        evaluate(run.task, run.pipeline, dataset, 2, options=run.options, device=run.device)
    return len(micro_batches) + -(-len(dataset) // 2), inputs.call_count


def test_the_chunks_of_a_rank_share_the_inputs_of_a_micro_batch(tmp_path):
    tree = settings(tmp_path, model={"num_layers": 4}, parallel={"pipeline": 2, "virtual": 2})
    for num_micro_batches, num_inputs in ranks(2, batches_and_inputs, tree):
        assert num_inputs == num_micro_batches


class NoStages(PretrainGPT):
    costs = Task.costs


class NoHiddenShape(PretrainGPT):
    hidden_shape = Task.hidden_shape


class ScaledStage(GPTModel):
    """A model with a parameter that has the same name in every stage."""

    def finish(self, seed: int) -> None:
        self.declare("scale", ParameterSpec((1,), "ones"), self.options.pg_collection, self.options.dtype)
        super().finish(seed)


class ScaledStages(PretrainGPT):
    def build_model(self, options: BuildOptions, stage: Stage | None = None) -> Any:
        return ScaledStage(self.config.model, options, stage=stage)


def refusal_of_stages(tree: dict[str, Any], task: type[PretrainGPT]) -> str:
    config = load_run(tree, world_size=2)
    with pytest.raises(ConfigError) as refusal:
        build_run(config, torch.device("cpu"), RunParts(task(config)))
    return str(refusal.value)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (NoCores, "lists core_attn, but this GPTModel has none; use layernorm, self_attn"),
        (NoEnd, "rank 1: there is no end"),
        (NoStages, "the model of NoStages cannot be split into stages; use parallel.pipeline=1"),
        (NoHiddenShape, "NoHiddenShape defines costs() but not hidden_shape()"),
    ],
)
def test_stages_that_cannot_be_built_are_refused_on_every_rank(task, message, tmp_path):
    tree = settings(tmp_path, parallel={"pipeline": 2}, train={"recompute": "selective"})
    for refusal in ranks(2, refusal_of_stages, tree, task):
        assert message in refusal


@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("interleaved", 2), ("zb_v", 2)])
def test_a_parameter_that_two_stages_have_is_refused_on_every_rank(schedule, virtual, tmp_path):
    # stages may share the names of declared copies
    model = {"num_layers": 4, "tie_word_embeddings": True}
    tree = settings(tmp_path, model=model, parallel={"pipeline": 2, "virtual": virtual, "schedule": schedule})
    for refusal in ranks(2, refusal_of_stages, tree, ScaledStages):
        assert "parameter scale must be in one stage" in refusal
        assert "ScaledStage has it in stages 0 and 1;" in refusal
