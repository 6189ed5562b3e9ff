"""Seeded faults in experts are found in the layout with the fewest axes, and the layer or weight is named."""

from math import prod
from typing import Any

import pytest

from megalith.insight.verify.cover import AXES, FOLDED
from megalith.insight.verify.proof import Case
from tests.insight.verify.proofs import GPT2_RECIPE, Fault, begin, found_with
from tests.training import moe_faults as faults

MOE = {"num_experts": 8, "top_k": 2, "router": {"sequence_balance": 0.1}}
GIVEN, ROUTER = "the output of model.layers.0.mlp", "model.layers.1.mlp.gate.weight"
EXPERT, EXPERT_TENSOR = {"shard": 2, "expert": 2}, {"shard": 2, "expert_tensor": 2}
TENSOR = {"tensor": 2, "sequence": True, "shard": 1, "expert_tensor": 1}
# a fault, a recipe's layout, the axes of the smallest layout that shows it, and what differs first
FAULTS: list[tuple[Fault, dict[str, Any], set[str], str]] = [
    (faults.send_tokens_to_the_next_expert, EXPERT, {"shard", "expert"}, GIVEN),
    (faults.apply_weights_in_the_order_in_which_rows_were_sent, EXPERT, {"shard", "expert"}, GIVEN),
    (faults.keep_the_terms_of_expert_tensor_apart, EXPERT_TENSOR, {"shard", "expert_tensor"}, GIVEN),
    (faults.take_a_routers_part_of_a_gradient_for_the_whole, TENSOR, {"tensor"}, ROUTER),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "parallel", "axes", "first"), [pytest.param(*each, id=each[0].__name__) for each in FAULTS]
)
def test_a_mistake_with_experts_is_named(fault, parallel, axes, first, tmp_path):
    degrees = {axis: parallel[axis] for axis in AXES if parallel.get(axis, 1) > 1}
    num_ranks = prod(degree for axis, degree in degrees.items() if axis not in FOLDED)
    recipe = {**GPT2_RECIPE, "model": {**GPT2_RECIPE["model"], "moe": MOE}, "parallel": parallel}
    result, fewest = found_with(fault, begin(recipe, num_ranks, tmp_path), Case(degrees, "float64", "reference"))
    assert not result.same
    assert fewest.first is not None, fewest.failure
    assert (set(fewest.case.degrees), fewest.first[0].name) == (axes, first)
