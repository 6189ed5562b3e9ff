"""The layout suite detects mistakes: seeded classic faults of parallel training each show as a difference."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megalith.fusions.cross_entropy import steps as cross_entropy_steps
from megalith.models import language_model
from megalith.numerics.dropout import DropoutKey
from megalith.optim import grad_norm
from megalith.parallel import parameters
from megalith.parallel.pipeline.links import Messages
from megalith.parallel.pipeline.pipeline import Pipeline
from megalith.parallel.tensor import layers, regions
from megalith.topology import collectives
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.training import setup, step
from megalith.training.run import Run
from megalith.training.tasks.pretrain_gpt import PretrainGPT
from megalith.transformer import dot_product_attention
from tests.rank_pool import ranks
from tests.tiny_run import GPT2, settings
from tests.training.context_faults import CONTEXT_FAULTS, GATHERED, RING, TRADED
from tests.training.on_ranks import first_steps
from tests.training.reference import Trajectory, differences, reference

Fault = Callable[[], Any]


def identity(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return x


def never_reduce_row_parallel_outputs() -> Any:
    return patch.object(regions, "reduce_from_tensor_model_parallel_region", identity)


def reduce_over_all_ranks_for_those_of_tp() -> Any:
    def reduce(x: torch.Tensor, group: Any) -> torch.Tensor:
        return collectives.reduce_from_tensor_model_parallel_region(x, torch.distributed.group.WORLD)

    return patch.object(regions, "reduce_from_tensor_model_parallel_region", reduce)


def never_reduce_input_gradients() -> Any:
    return patch.object(regions, "copy_to_tensor_model_parallel_region", identity)


def keep_own_part_of_the_sequence_instead_of_the_sum() -> Any:
    return patch.object(
        regions, "reduce_scatter_to_sequence_parallel_region", collectives.scatter_to_sequence_parallel_region
    )


def gather_without_reducing_gradients() -> Any:
    def gather(x: torch.Tensor, group: Any) -> torch.Tensor:
        return collectives.gather_from_sequence_parallel_region(x, group, tensor_parallel_output_grad=False)

    return patch.object(regions, "gather_from_sequence_parallel_region", gather)


def take_partial_gradients_for_whole_ones() -> Any:
    def local(parameter: torch.Tensor, *, partial: bool = False) -> torch.Tensor:
        return parameters.local(parameter)

    return patch.object(layers, "local", local)


def sum_whole_gradients_over_tp() -> Any:
    def local(parameter: torch.Tensor, *, partial: bool = False) -> torch.Tensor:
        return parameters.local(parameter, partial=partial or parameter.ndim == 1)

    return patch.object(layers, "local", local)


def average_over_data_parallel_ranks() -> Any:
    return patch.object(torch.distributed.fsdp.FSDPModule, "set_gradient_divide_factor", lambda *_: None)


def take_the_mean_of_the_ranks_means() -> Any:
    def sum_totals(run: Any, counts: dict[str, int], stop: bool) -> step.StepTotals:
        return step.StepTotals({"lm": counts["lm"] * run.pg_collection.size("dp")}, stop)

    return patch("tests.training.on_ranks.sum_totals", sum_totals)


def let_every_rank_of_tp_speak_for_its_tokens() -> Any:
    return patch.object(ProcessGroupCollection, "speaks_for_tokens", True)


def count_replicated_gradients_on_every_rank() -> Any:
    return patch.object(grad_norm, "_counts_here", lambda _: True)


def leave_sharded_gradients_out_of_the_norm() -> Any:
    return patch.object(grad_norm, "_counts_here", lambda gradient: gradient.device_mesh.get_rank() == 0)


def leave_the_softmax_unreduced() -> Any:
    return patch.object(cross_entropy_steps, "gather_from_sequence_parallel_region", lambda parts, *_, **__: parts)


def look_up_tokens_of_other_ranks_as_row_zero() -> Any:
    def forward(self: layers.VocabParallelEmbedding, tokens: torch.Tensor) -> torch.Tensor:
        rows = (tokens.t() - self.first).clamp(0, self.end - self.first - 1)
        x = torch.nn.functional.embedding(rows, parameters.local(self.weight))
        return regions.leave_tensor_parallel(x, self.options.pg_collection.tp, self.options.sequence_parallel)

    return patch.object(layers.VocabParallelEmbedding, "forward", forward)


def number_rows_by_rank() -> Any:
    make = PretrainGPT.inputs

    def numbered(self: PretrainGPT, batch: Any, at_step: int, device: torch.device) -> Any:
        batch.row_ids[:] = range(len(batch.row_ids))
        return make(self, batch, at_step, device)

    return patch.object(PretrainGPT, "inputs", numbered)


def draw_attention_dropout_by_local_head() -> Any:
    with_offset = dot_product_attention.attend

    def without(*operands: Any, **scores: Any) -> torch.Tensor:
        return with_offset(*operands, **{**scores, "head_offset": 0})

    return patch.object(dot_product_attention, "attend", without)


def drop_local_positions_under_sequence_parallelism() -> Any:
    def first_part(key: DropoutKey, group: Any) -> DropoutKey:
        tokens = key.tokens.t()
        return replace(key, tokens=tokens if group is None else torch.chunk(tokens, group.size())[0])

    return patch.object(language_model, "sequence_parallel_key", first_part)


def begin_every_shard_at_the_first_element() -> Any:
    draw = parameters.normal_shard

    def at_zero(seed: Any, name: Any, shape: Any, offset: Any, size: Any, std: Any, **more: Any) -> torch.Tensor:
        return draw(seed, name, shape, [0] * len(offset), size, std, **more)

    return patch.object(parameters, "normal_shard", at_zero)


def read_the_same_rows_on_every_rank() -> Any:
    loader = setup.StepLoader
    return patch.object(setup, "StepLoader", lambda dataset, collate, rank, size: loader(dataset, collate, 0, size))


def add_the_row_parallel_bias_on_every_rank() -> Any:
    leave = regions.leave_tensor_parallel

    def forward(self: layers.RowParallelLinear, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else parameters.local(self.bias)
        y = torch.nn.functional.linear(x, parameters.local(self.weight), bias)
        return leave(y, self.options.pg_collection.tp, self.options.sequence_parallel)

    return patch.object(layers.RowParallelLinear, "forward", forward)


def let_every_stage_speak_for_its_tokens() -> Any:
    return patch.object(ProcessGroupCollection, "speaks_for_tokens", property(lambda self: self.rank("tp") == 0))


def keep_the_gradients_of_tied_embeddings_apart() -> Any:
    return patch.object(Pipeline, "_sum_shared_gradients", lambda self: None)


def count_tied_embeddings_in_both_stages() -> Any:
    return patch.object(Run, "counted_parameters", Run.parameters)


def give_the_gradient_of_another_micro_batch() -> Any:
    send = Messages.send_gradient

    def of_the_first(self: Messages, micro_batch: int, chunk: int, gradient: torch.Tensor) -> None:
        if micro_batch == 0:
            self.first = gradient
        send(self, micro_batch, chunk, self.first)

    return patch.object(Messages, "send_gradient", of_the_first)


def take_the_gradient_of_a_shared_group_for_whole() -> Any:
    def forward(self: layers.BlockReplicatedLinear, x: torch.Tensor) -> torch.Tensor:
        weight, bias = (parameters.local(each)[self.rows] for each in (self.weight, self.bias))
        return torch.nn.functional.linear(x, weight, bias)

    return patch.object(layers.BlockReplicatedLinear, "forward", forward)


def deal_shared_groups_in_turn() -> Any:
    begin = layers.BlockReplicatedLinear.__init__

    def strided(self: layers.BlockReplicatedLinear, H: int, D: int, G: int, options: Any, **more: Any) -> None:
        begin(self, H, D, G, options, **more)
        first = options.pg_collection.rank("tp") % G * D
        self.rows = slice(first, first + D)

    return patch.object(layers.BlockReplicatedLinear, "__init__", strided)


TENSOR = {"tensor": 2}
PIPELINE = {"pipeline": 2}
SEQUENCE = {"tensor": 2, "sequence": True}
SHARD = {"shard": 2}
# fault: the layout that it breaks
FAULTS: dict[Fault, dict[str, Any]] = {
    never_reduce_row_parallel_outputs: TENSOR,
    reduce_over_all_ranks_for_those_of_tp: {"tensor": 2, "shard": 2},
    never_reduce_input_gradients: TENSOR,
    keep_own_part_of_the_sequence_instead_of_the_sum: SEQUENCE,
    gather_without_reducing_gradients: SEQUENCE,
    take_partial_gradients_for_whole_ones: SEQUENCE,
    sum_whole_gradients_over_tp: TENSOR,
    average_over_data_parallel_ranks: SHARD,
    take_the_mean_of_the_ranks_means: SHARD,
    count_replicated_gradients_on_every_rank: TENSOR,
    leave_sharded_gradients_out_of_the_norm: SHARD,
    leave_the_softmax_unreduced: TENSOR,
    look_up_tokens_of_other_ranks_as_row_zero: TENSOR,
    number_rows_by_rank: SHARD,
    draw_attention_dropout_by_local_head: TENSOR,
    drop_local_positions_under_sequence_parallelism: SEQUENCE,
    begin_every_shard_at_the_first_element: SHARD,
    read_the_same_rows_on_every_rank: SHARD,
    add_the_row_parallel_bias_on_every_rank: TENSOR,
    let_every_rank_of_tp_speak_for_its_tokens: TENSOR,
    let_every_stage_speak_for_its_tokens: PIPELINE,
    keep_the_gradients_of_tied_embeddings_apart: PIPELINE,
    count_tied_embeddings_in_both_stages: PIPELINE,
    give_the_gradient_of_another_micro_batch: PIPELINE,
}
# with fewer query groups than ranks; test_layouts.py tests the same layout without a fault
SHARED = {"tensor": 4, "sequence": True}
FAULTS_OF_SHARED_GROUPS: list[Fault] = [
    take_the_gradient_of_a_shared_group_for_whole,
    deal_shared_groups_in_turn,
]


@contextmanager
def nothing() -> Iterator[None]:
    yield


def first_steps_with(fault: Fault, tree: dict[str, Any]) -> Trajectory:
    with fault():
        return first_steps(tree, torch.distributed.get_world_size())


@pytest.fixture(scope="module")
def tree_and_reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Trajectory]:
    model = {**GPT2, "ffn_hidden_size": None, "num_query_groups": None}
    tree = settings(tmp_path_factory.mktemp("faults"), model=model)
    return tree, reference(tree)


@pytest.fixture(scope="module")
def shared_tree_and_reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Trajectory]:
    model = {**GPT2, "ffn_hidden_size": None, "num_query_groups": 2}
    tree = settings(tmp_path_factory.mktemp("shared"), model=model, parallel=SHARED)
    return tree, reference({name: group for name, group in tree.items() if name != "parallel"})


# `make test` takes the first fault of each axis, with the layout that it breaks; tests/insight/verify has others
IN_MAKE_TEST = (
    never_reduce_row_parallel_outputs,
    average_over_data_parallel_ranks,
    keep_the_gradients_of_tied_embeddings_apart,
    next(iter(CONTEXT_FAULTS)),
)
LAYOUTS_IN_MAKE_TEST = [(FAULTS | CONTEXT_FAULTS)[fault] for fault in IN_MAKE_TEST]


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(parallel, marks=() if parallel in LAYOUTS_IN_MAKE_TEST else pytest.mark.slow)
        for parallel in (TENSOR, SEQUENCE, SHARD, PIPELINE, RING, GATHERED, TRADED)
    ],
    ids=str,
)
def test_without_a_fault_nothing_is_found(parallel, tree_and_reference):
    tree, want = tree_and_reference
    for found in ranks(2, first_steps_with, nothing, {**tree, "parallel": parallel}):
        assert differences(found, want) == []


@pytest.mark.parametrize(
    ("fault", "parallel"),
    [
        pytest.param(*each, id=each[0].__name__, marks=() if each[0] in IN_MAKE_TEST else pytest.mark.slow)
        for each in [*FAULTS.items(), *CONTEXT_FAULTS.items()]
    ],
)
def test_a_fault_is_caught(fault, parallel, tree_and_reference):
    tree, want = tree_and_reference
    num_ranks = prod(degree for degree in parallel.values() if type(degree) is int)
    found = ranks(num_ranks, first_steps_with, fault, {**tree, "parallel": parallel})
    assert any(differences(trajectory, want) for trajectory in found)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.__name__, marks=[pytest.mark.slow] if number else [])
        for number, fault in enumerate(FAULTS_OF_SHARED_GROUPS)
    ],
)
def test_a_fault_of_heads_that_ranks_share_is_caught(fault, shared_tree_and_reference):
    tree, want = shared_tree_and_reference
    assert any(differences(trajectory, want) for trajectory in ranks(4, first_steps_with, fault, tree))
