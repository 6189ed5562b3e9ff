"""Split backwards in a run: bit for bit what whole ones compute; the faults they invite are caught."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megalith.config import load_run
from megalith.errors import ConfigError
from megalith.numerics.tolerance import LAYOUT_FLOAT64
from megalith.observe.metrics import read_metrics
from megalith.parallel.pipeline import executor
from megalith.parallel.pipeline.pipeline import Pipeline
from megalith.parallel.pipeline.plan import Action
from megalith.parallel.pipeline.split_product import WeightPart
from megalith.topology import rank_groups
from megalith.training.loop import Outcome
from megalith.training.setup import RunParts, build_run
from tests.rank_pool import ranks
from tests.tiny_run import GPT2, settings
from tests.training import plugins
from tests.training.on_ranks import first_steps
from tests.training.outcomes import final_tensors, run_here
from tests.training.reference import Trajectory, differences, reference

GPT2_OF_4 = {**GPT2, "num_layers": 4, "ffn_hidden_size": None, "num_query_groups": None}
ZERO_BUBBLE = {"pipeline": 2, "schedule": "zero_bubble"}
V = {"pipeline": 2, "virtual": 2, "schedule": "zb_v"}
# a schedule that splits backwards, and one that does not, with as many stages
WHOLE = [(ZERO_BUBBLE, {"pipeline": 2}), (V, {"pipeline": 2, "virtual": 2})]


@pytest.mark.parametrize(
    ("dtype", "recompute", "shards"),
    [
        ("bfloat16", "none", 1),
        ("float64", "none", 1),
        pytest.param("float64", "full", 2, marks=pytest.mark.slow),
        pytest.param("bfloat16", "selective", 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(("split", "whole"), WHOLE, ids=["zero_bubble", "zb_v"])
def test_weights_are_bitwise_those_of_whole_backwards(split, whole, dtype, recompute, shards, tmp_path):
    # with clipping by a norm summed over ranks, they would not be
    tree = settings(
        tmp_path,
        model=GPT2_OF_4,
        train={"micro_batch_size": 1, "recompute": recompute},
        optim={"clip_norm": 0.0},
        precision={"dtype": dtype},
    )
    found = []
    for parallel in (split, whole):
        num_ranks = 2 * shards
        found.append(ranks(num_ranks, first_steps, {**tree, "parallel": {**parallel, "shard": shards}}, num_ranks)[0])
    got, want = found
    for tensors, expected in zip((*got.gradients, got.final), (*want.gradients, want.final), strict=True):
        assert [name for name, tensor in expected.items() if not torch.equal(tensors[name], tensor)] == []


@pytest.mark.parametrize("split", [ZERO_BUBBLE, V], ids=["zero_bubble", "zb_v"])
def test_gradients_of_one_micro_batch_which_are_never_added_up_are_reduced_too(split, tmp_path):
    train = {"micro_batch_size": 8, "global_batch_size": 8}
    tree = settings(tmp_path, model=GPT2_OF_4, train=train, precision={"dtype": "bfloat16"}, optim={"clip_norm": 0.0})
    got, want = (ranks(2, first_steps, {**tree, "parallel": parallel}, 2)[0] for parallel in (split, {"pipeline": 2}))
    assert got.losses == want.losses
    assert [name for name, tensor in want.final.items() if not torch.equal(got.final[name], tensor)] == []


def take_a_weights_part_twice() -> Any:
    backward = WeightPart.backward

    def twice(self: WeightPart) -> None:
        backward(self)
        backward(self)

    return patch.object(WeightPart, "backward", twice)


def forget_a_weights_part() -> Any:
    backward_weight = executor._Step.backward_weight

    def without_one(self: executor._Step, action: Action) -> None:
        if action.micro_batch == 1:
            self._weight_parts[action.chunk, 1].pop()
        backward_weight(self, action)

    return patch.object(executor._Step, "backward_weight", without_one)


def take_the_weights_parts_of_another_micro_batch() -> Any:
    backward_weight = executor._Step.backward_weight

    def of_the_last(self: executor._Step, action: Action) -> None:
        found = self._weight_parts
        found[action.chunk, action.micro_batch] = list(found[max(key for key in found if key[0] == action.chunk)])
        backward_weight(self, action)

    return patch.object(executor._Step, "backward_weight", of_the_last)


def reduce_before_the_last_weights_parts() -> Any:
    def backward_weight(self: executor._Step, action: Action) -> None:
        chunk = self._chunks[action.chunk]
        executor.gradient_sync(chunk, last=action.reduces, keeps_weights=True)
        executor.finish_backward(chunk)
        for part in self._weight_parts.pop((action.chunk, action.micro_batch)):
            part.backward()

    return patch.object(executor._Step, "backward_weight", backward_weight)


def let_the_last_rank_speak_for_tokens() -> Any:
    collection = rank_groups.ParallelState.collection
    return patch.object(rank_groups.ParallelState, "collection", lambda self, output_rank: collection(self))


def never_refresh_copies() -> Any:
    return patch.object(Pipeline, "_refresh_copies", lambda self: None)


def forget_the_gradients_of_copies() -> Any:
    def without(self: Pipeline[Any]) -> None:
        for _, copy in self.copies:
            copy.grad = None

    return patch.object(Pipeline, "_sum_shared_gradients", without)


def keep_the_gradients_of_copies() -> Any:
    def add(self: Pipeline[Any]) -> None:
        for weight, copy in self.copies:
            weight.grad.add_(copy.grad)

    return patch.object(Pipeline, "_sum_shared_gradients", add)


# fault: the layout that it breaks
FAULTS: dict[Callable[[], Any], dict[str, Any]] = {
    take_a_weights_part_twice: ZERO_BUBBLE,
    forget_a_weights_part: ZERO_BUBBLE,
    take_the_weights_parts_of_another_micro_batch: ZERO_BUBBLE,
    reduce_before_the_last_weights_parts: ZERO_BUBBLE,
    let_the_last_rank_speak_for_tokens: V,
    never_refresh_copies: V,
    forget_the_gradients_of_copies: V,
    keep_the_gradients_of_copies: V,
}


def first_steps_with(fault: Callable[[], Any], tree: dict[str, Any]) -> Trajectory:
    with fault():
        return first_steps(tree, 2)


@pytest.fixture(scope="module")
def tree_and_reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Trajectory]:
    tree = settings(tmp_path_factory.mktemp("faults"), model=GPT2_OF_4, train={"micro_batch_size": 1})
    return tree, reference(tree)


# a fault of split backwards, and one of the copies in a V
IN_MAKE_TEST = (forget_a_weights_part, keep_the_gradients_of_copies)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.__name__, marks=() if fault in IN_MAKE_TEST else pytest.mark.slow)
        for fault in FAULTS
    ],
)
def test_a_fault_is_caught(fault, tree_and_reference):
    tree, want = tree_and_reference
    for found in ranks(2, first_steps_with, fault, {**tree, "parallel": FAULTS[fault]}):
        assert differences(found, want)


def refusal_of(product: Any, tree: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as refusal:
        build_run(load_run(tree, world_size=2), torch.device("cpu"), RunParts(matrix_product=product))
    return str(refusal.value)


@pytest.mark.parametrize("parallel", [ZERO_BUBBLE, V], ids=["zero_bubble", "zb_v"])
def test_a_matrix_product_of_the_users_own_is_refused_on_every_rank(parallel, tmp_path):
    tree = settings(tmp_path, model=GPT2_OF_4, parallel=parallel)
    for message in ranks(2, refusal_of, plugins.product_of_8_bits, tree):
        assert message.startswith(f"parallel.schedule={parallel['schedule']} computes the weight gradients of linear")
        assert message.endswith("or use a schedule that does not split the backward: 1f1b, gpipe or interleaved")


def test_a_v_with_tied_embeddings_is_evaluated_saved_and_resumed_as_one_process_is(tmp_path):
    """Its two copies of the embedding, both on rank 0, are one tensor in the optimizer and in checkpoints."""
    data = {"valid": settings(tmp_path)["data"]["train"]}
    train = {"micro_batch_size": 1, "evaluation": {"every": 1}}
    found = []
    for world_size, parallel in ((1, {}), (2, V)):
        for steps in (2, 4):
            tree = settings(
                tmp_path,
                model=GPT2_OF_4,
                data=data,
                train={**train, "steps": steps},
                parallel=parallel,
                run=str(tmp_path / str(world_size)),
            )
            assert set(ranks(world_size, run_here, tree, world_size)) == {Outcome.DONE}
        found.append((read_metrics(Path(tree["run"])), final_tensors(tree["run"])))
    (want, tensors), (got, tensors_of_v) = found
    for name in ("loss", "valid_loss"):
        values = [record[name] for record in want if name in record]
        assert len(values) == 4
        assert [record[name] for record in got if name in record] == pytest.approx(values, rel=LAYOUT_FLOAT64)
    assert tensors_of_v.keys() == tensors.keys()
