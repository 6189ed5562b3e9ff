"""Seeded faults are found in the layout with the fewest axes that shows them, and the first difference is named."""

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest

from megalith.insight.verify.cover import AXES
from megalith.insight.verify.proof import Case, Proof
from tests.insight.verify.pair_faults import PAIR_FAULTS
from tests.insight.verify.proofs import GPT2_RECIPE, begin, found_with
from tests.training import context_faults as context
from tests.training import test_faults as other

Fault = Callable[[], Any]

EMBEDDED = "the output of model.embed_tokens"
INTO_LAYERS = "the input of model.layers.0"
# the output of attention; under tp, only that of its projection is a whole row of the residual stream
ATTENDED = "the input of model.layers.0.self_attn.o_proj"
PROJECTED = "the output of model.layers.0.self_attn.o_proj"
LOSS, NORM = "the loss", "the norm of all gradients"
# a fault of one axis: what differs first
NAMED: dict[Fault, str] = {
    other.never_reduce_row_parallel_outputs: EMBEDDED,
    other.never_reduce_input_gradients: "gradient of model.norm.weight",
    other.keep_own_part_of_the_sequence_instead_of_the_sum: EMBEDDED,
    other.gather_without_reducing_gradients: "gradient of model.norm.weight",
    other.take_partial_gradients_for_whole_ones: "gradient of model.layers.1.mlp.down_proj.bias",
    other.sum_whole_gradients_over_tp: "gradient of model.layers.1.mlp.down_proj.weight",
    other.average_over_data_parallel_ranks: "gradient of model.norm.weight",
    other.count_replicated_gradients_on_every_rank: NORM,
    other.leave_sharded_gradients_out_of_the_norm: NORM,
    other.leave_the_softmax_unreduced: "the loss of each token",
    other.look_up_tokens_of_other_ranks_as_row_zero: EMBEDDED,
    other.number_rows_by_rank: INTO_LAYERS,
    other.draw_attention_dropout_by_local_head: PROJECTED,
    other.drop_local_positions_under_sequence_parallelism: INTO_LAYERS,
    other.begin_every_shard_at_the_first_element: "model.layers.0.self_attn.q_proj.weight",
    other.read_the_same_rows_on_every_rank: EMBEDDED,
    other.add_the_row_parallel_bias_on_every_rank: PROJECTED,
    other.let_every_rank_of_tp_speak_for_its_tokens: "gradient of model.norm.weight",
    other.let_every_stage_speak_for_its_tokens: LOSS,
    other.keep_the_gradients_of_tied_embeddings_apart: "gradient of model.embed_tokens.weight",
    other.count_tied_embeddings_in_both_stages: NORM,
    other.give_the_gradient_of_another_micro_batch: "gradient of model.layers.0.mlp.down_proj.weight",
    context.take_the_last_part_of_the_keys_for_all: ATTENDED,
    context.average_the_parts_without_their_weights: ATTENDED,
    context.cut_the_batch_into_consecutive_parts: EMBEDDED,
    context.give_a_rank_its_neighbours_late_chunk: ATTENDED,
    context.number_positions_on_each_rank_from_zero: INTO_LAYERS,
    context.number_tokens_for_dropout_on_each_rank_from_zero: INTO_LAYERS,
    context.drop_keys_by_their_place_in_a_part: ATTENDED,
    context.forget_the_gradients_of_remote_keys: "gradient of model.layers.1.self_attn.v_proj.weight",
    context.attend_to_own_keys_only: ATTENDED,
    context.let_one_rank_of_cp_speak_for_all: LOSS,
    context.take_keys_in_the_order_of_ranks: ATTENDED,
    context.give_gathered_keys_the_gradient_of_one_rank: "gradient of model.layers.1.self_attn.v_proj.weight",
    context.drop_by_heads_before_the_trade: ATTENDED,
}
PAIRS_NAMED = {
    ("tensor", "context"): PROJECTED,
    ("tensor", "pipeline"): "gradient of model.embed_tokens.weight",
    ("tensor", "replicate"): EMBEDDED,
    ("tensor", "shard"): EMBEDDED,
    ("context", "pipeline"): "the input of model.layers.1.self_attn.o_proj",
}
# faults in micro-batching, which one rank has too
ON_ONE_RANK = {other.number_rows_by_rank, context.number_tokens_for_dropout_on_each_rank_from_zero}
IN_MAKE_TEST = {other.never_reduce_input_gradients, ("tensor", "pipeline")}
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def proofs(tmp_path_factory) -> Callable[[dict[str, Any]], Proof]:
    """The proof for a layout, created once."""
    made: dict[str, Proof] = {}

    def proof_of(parallel: dict[str, Any]) -> Proof:
        folder: Path = tmp_path_factory.mktemp("proof")
        if str(parallel) not in made:
            size = prod(parallel.get(axis, 1) for axis in AXES)
            made[str(parallel)] = begin({**GPT2_RECIPE, "parallel": parallel}, size, folder)
        return made[str(parallel)]

    return proof_of


def what_differs_first(fault: Fault, prepared: Proof, degrees: dict[str, int]) -> tuple[set[str], str]:
    """The axes of the smallest layout that shows ``fault``, and what is reported as the first difference."""
    ordered = {axis: degrees[axis] for axis in AXES if axis in degrees}
    result, fewest = found_with(fault, prepared, Case(ordered, "float64", "reference"))
    assert not result.same
    assert fewest.first is not None, fewest.failure
    key, _ = fewest.first
    return set(fewest.case.degrees), f"gradient of {key.name}" if key.kind == "gradient" else key.name


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=[] if fault in IN_MAKE_TEST else slow) for fault in NAMED],
    ids=lambda fault: fault.__name__,
)
def test_a_mistake_with_one_axis_is_named(fault, proofs):
    parallel = {**other.FAULTS, **context.CONTEXT_FAULTS}[fault]
    [axis] = parallel.keys() & set(AXES)
    # next to an axis that is unrelated to it
    beside = "replicate" if axis == "shard" else "shard"
    degrees = {axis: 2, beside: 2}
    axes, first = what_differs_first(fault, proofs({"shard": 1, **parallel, beside: 2}), degrees)
    if fault in ON_ONE_RANK:
        assert axes == set()
    else:  # either axis of data parallelism may show it
        assert axes in ([{"replicate"}, {"shard"}] if axis == "shard" else [{axis}])
    assert first == NAMED[fault]


@pytest.mark.parametrize(
    "pair", [pytest.param(p, marks=[] if p in IN_MAKE_TEST else slow) for p in PAIR_FAULTS], ids=str
)
def test_a_mistake_where_two_axes_meet_is_named_by_both(pair, proofs):
    degrees = dict.fromkeys(pair, 2)
    axes, first = what_differs_first(PAIR_FAULTS[pair], proofs({"shard": 1, **degrees}), degrees)
    assert (axes, first) == (set(pair), PAIRS_NAMED.get(pair, LOSS))


@slow
@pytest.mark.parametrize("fault", other.FAULTS_OF_SHARED_GROUPS, ids=lambda fault: fault.__name__)
def test_a_mistake_of_heads_that_ranks_share_is_named(fault, tmp_path):
    recipe = {
        **GPT2_RECIPE,
        "model": {**GPT2_RECIPE["model"], "num_query_groups": 2},
        "parallel": {**other.SHARED, "shard": 1},
    }
    axes, first = what_differs_first(fault, begin(recipe, 4, tmp_path), {"tensor": 4})
    gradient = "gradient of model.layers.1.self_attn.v_proj.weight"
    assert (axes, first) == ({"tensor"}, PROJECTED if fault is other.deal_shared_groups_in_turn else gradient)
