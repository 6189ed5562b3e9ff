"""memory: counts on tensors without storage match the memory of real ones, in each layout; the rest is by hand."""

from contextlib import nullcontext
from dataclasses import astuple
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from megalith.config import load_run
from megalith.errors import ConfigError
from megalith.torch_compat.tensors import DEPENDS_ON_VALUES
from megalith.training import memory
from megalith.training.dry_run import describe
from megalith.training.memory import planned_memory
from megalith.training.preflight import preflight
from megalith.training.pretrain import pretrain
from megalith.training.tasks.choose import task_of
from tests.rank_pool import ranks
from tests.tiny_run import GPT2, LLAMA, SEQ, settings

H, F, V, L = 32, 48, 61, 2
FLOAT32 = {"dtype": "float32"}
INPUTS = 1024  # bytes of tokens, labels and masks, which are real in both, and counted where all tensors are


def planned(tree, world_size=1):
    config = load_run(tree, world_size=world_size)
    return planned_memory(config, task_of(config), world_size)


def with_real_tensors(tree, world_size):
    """(kept, peak, gathered) of each stage, measured with this rank's real tensors and collectives.

    The least of three measurements: gloo's threads hold the tensors of a collective for a moment after it has ended.
    """
    config = load_run(tree, world_size=world_size)
    with patch.object(memory, "fake_tensors", nullcontext):
        found = [memory._counted_stages(config, task_of(config), world_size) for _ in range(3)]
    return [memory._Counted(*map(min, zip(*map(astuple, stages), strict=True))) for stages in zip(*found, strict=True)]


def without_memory(tree, world_size):
    config = load_run(tree, world_size=world_size)
    with memory.fake_ranks(world_size):
        return memory._counted_stages(config, task_of(config), world_size)


@pytest.mark.parametrize(
    ("changes", "world_size"),
    [
        # one process, and each axis that splits a layer or the model
        ({"model": GPT2, "train": {"recompute": "selective"}}, 1),
        ({"parallel": {"tensor": 2, "sequence": True}}, 2),
        ({"parallel": {"context": 2}}, 2),
        ({"parallel": {"pipeline": 2}}, 2),
        pytest.param({}, 1, marks=pytest.mark.slow),
        pytest.param({"train": {"recompute": "full"}}, 1, marks=pytest.mark.slow),
        pytest.param({"train": {"fused_linear_cross_entropy": True}}, 1, marks=pytest.mark.slow),
        pytest.param({"precision": {"dtype": "bfloat16"}}, 1, marks=pytest.mark.slow),
        pytest.param({"parallel": {"tensor": 2}, "model": GPT2}, 2, marks=pytest.mark.slow),
    ],
)
def test_what_is_counted_without_memory_is_what_real_tensors_take(changes, world_size, tmp_path):
    tree = settings(tmp_path, **{"precision": FLOAT32, **changes})
    [found, *_] = ranks(world_size, with_real_tensors, tree, world_size)
    for real, counted in zip(found, without_memory(tree, world_size), strict=True):
        assert counted.gathered == real.gathered
        assert real.kept - INPUTS <= counted.kept <= real.kept
        assert real.peak - INPUTS <= counted.peak <= real.peak


def test_no_weight_is_drawn_to_count_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("megalith.parallel.parameters.normal_shard", None)
    assert planned(settings(tmp_path)).activations > 0


def test_state_and_gathered_weights_are_those_of_the_layout(tmp_path):
    layer = H * 64 + H * H + 3 * H * F + 2 * H
    num_parameters, head = 2 * V * H + L * layer + H, 2 * V * H + H  # a unit: a layer, or everything outside of layers
    alone = planned(settings(tmp_path, precision=FLOAT32))
    assert alone.weights == alone.gradients == 4 * num_parameters
    assert alone.moments == 8 * num_parameters
    two = sum(sorted([layer, layer, head])[-2:])
    assert alone.gathered == 4 * (num_parameters + two)  # nothing is freed where nothing is sharded
    shared = planned(settings(tmp_path, precision={"dtype": "bfloat16"}, parallel={"shard": 2}), 2)
    assert (shared.weights, shared.moments) == (2 * num_parameters, 4 * num_parameters)
    assert shared.gathered == 2 * (two + two)


def test_recomputed_layers_keep_their_inputs_alone(tmp_path):
    few, many = (
        without_memory(
            settings(tmp_path, precision=FLOAT32, model={**LLAMA, "num_layers": layers}, train={"recompute": "full"}), 1
        )
        for layers in (1, 2)
    )
    micro_batch = load_run(settings(tmp_path)).train.micro_batch_size
    assert many[0].kept - few[0].kept == SEQ * micro_batch * H * 4


def test_a_stage_holds_the_micro_batches_that_its_schedule_has_in_flight(tmp_path):
    trees = [
        settings(tmp_path, precision=FLOAT32, parallel={"pipeline": 2, "schedule": schedule})
        for schedule in ("1f1b", "gpipe")
    ]
    one_by_one, all_at_once = (planned(tree, 2) for tree in trees)
    first, last = without_memory(trees[0], 2)
    train = load_run(trees[0], world_size=2).train
    m = train.global_batch_size // train.micro_batch_size
    assert m > 2
    assert one_by_one.activations in (first.kept + first.peak, last.peak)
    assert all_at_once.activations in ((m - 1) * first.kept + first.peak, (m - 1) * last.kept + last.peak)


def test_rows_of_experts_are_not_counted_and_the_dry_run_says_so(tmp_path):
    model = {**LLAMA, "moe": {"num_experts": 4, "ffn_hidden_size": 16}}
    config = load_run(settings(tmp_path, model=model))
    with pytest.raises(ConfigError, match="router"):
        planned_memory(config, task_of(config), 1)
    assert "peak memory           not counted: the number of rows" in describe(config, 1)


def test_rows_that_masks_choose_are_not_counted():
    with (
        patch.object(memory, "_counted_stages", side_effect=DEPENDS_ON_VALUES[1]("aten.nonzero")),
        patch.object(memory, "fake_ranks", lambda world_size: nullcontext()),
        pytest.raises(ConfigError, match="which tokens are masked"),
    ):
        planned_memory(None, SimpleNamespace(routed_layers={}), 1)


def shown(tree):
    lines = []
    pretrain(preflight(tree, [], 1), lines.append, str)
    return lines


def test_a_run_says_what_it_has_taken_in_the_same_words_after_its_first_step(tmp_path):
    tree = settings(tmp_path, train={"steps": 2}, precision=FLOAT32)
    [lines] = ranks(1, shown, tree)
    [line] = [line for line in lines if line.startswith("peak memory")]
    plan = planned(tree)
    for name in ("weights", "gradients", "moments"):
        assert f"{name} {memory.quantity(getattr(plan, name))}B" in line
    [counted] = [line for line in describe(load_run(tree), 1).splitlines() if line.startswith("peak memory")]
    assert f"activations {memory.quantity(plan.activations)}B" in counted
