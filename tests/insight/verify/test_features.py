"""Features of a recipe other than its axes are in its proof, which finds faults that only they show."""

from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megalith.acceleration import recompute
from megalith.fusions.cross_entropy import linear_formulas as linear_cross_entropy
from megalith.fusions.fused_linear_cross_entropy import fused_linear_cross_entropy
from megalith.insight.verify.proof import Case
from megalith.parallel.tensor import cross_entropy, layers
from tests.insight.verify.proofs import GPT2_RECIPE, Fault, begin, found_with
from tests.training import test_zero_bubble as zero_bubble

TENSOR, PIPELINE = {"tensor": 2}, {"pipeline": 2}
IN_MAKE_TEST = ("zb_v",)  # the one whose fault is between two stages
CHUNK = 7  # tokens: the 64 of a small micro-batch make several chunks and a partial one


def take_the_fused_loss_by_chunks() -> Any:
    by_chunks = partial(fused_linear_cross_entropy, chunk_size=CHUNK)
    return patch.object(cross_entropy, "fused_linear_cross_entropy", by_chunks)


def keep_the_weights_gradient_of_the_last_chunk() -> Any:
    add = linear_cross_entropy._add_product

    def replace(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, first: bool) -> None:
        add(total, a, b, first=True)

    stack = ExitStack()
    stack.enter_context(take_the_fused_loss_by_chunks())
    stack.enter_context(patch.object(linear_cross_entropy, "_add_product", replace))
    return stack


def double_what_is_computed_again() -> Any:
    make = recompute._Recipe.make
    return patch.object(recompute._Recipe, "make", lambda self: 2.0 * make(self))


def forget_that_ranks_project_tokens_of_their_own() -> Any:
    local = layers.local
    return patch.object(layers, "local", lambda weight, partial=False: local(weight))


# settings, what each rank does in addition, a case, and a fault
FEATURES: dict[str, tuple[dict[str, Any], Fault, Case, Fault]] = {
    "zero_bubble": (
        {"parallel": {**PIPELINE, "schedule": "zero_bubble"}},
        ExitStack,
        Case(PIPELINE, "float64", "reference"),
        zero_bubble.forget_a_weights_part,
    ),
    "zb_v": (
        {"parallel": {**PIPELINE, "virtual": 2, "schedule": "zb_v"}},
        ExitStack,
        Case(PIPELINE, "float64", "reference"),
        zero_bubble.forget_the_gradients_of_copies,
    ),
    "recompute_modules": (
        {
            "parallel": {**TENSOR, "sequence": True},
            "train": {"recompute": "selective", "recompute_modules": ["self_attn", "layernorm", "mlp_act"]},
        },
        ExitStack,
        Case(TENSOR, "float64", "reference"),
        double_what_is_computed_again,
    ),
    "mla": (
        {
            "parallel": {**TENSOR, "sequence": True},
            "model": {
                "position_embedding_type": "rope",
                "add_bias_linear": False,
                "mla": {"kv_lora_rank": 512, "q_lora_rank": 1536},
            },
        },
        ExitStack,
        Case(TENSOR, "float64", "reference"),
        forget_that_ranks_project_tokens_of_their_own,
    ),
    "fused_linear_cross_entropy": (
        {"parallel": {**TENSOR, "sequence": True}, "train": {"fused_linear_cross_entropy": True}},
        take_the_fused_loss_by_chunks,
        Case(TENSOR, "float64", "blocked"),
        keep_the_weights_gradient_of_the_last_chunk,
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_MAKE_TEST else pytest.mark.slow) for name in FEATURES]
)
def test_it_is_proven_and_a_mistake_with_it_is_found(name, tmp_path):
    groups, also, case, fault = FEATURES[name]
    tree = {**GPT2_RECIPE, **{group: {**GPT2_RECIPE.get(group, {}), **values} for group, values in groups.items()}}
    tree["parallel"]["shard"] = 1
    prepared = begin(tree, 2, tmp_path)
    result, _ = found_with(also, prepared, case)
    assert result.same, result
    wrong, _ = found_with(fault, prepared, case)
    assert wrong.first is not None, wrong.failure
    assert wrong.first[0].kind == "gradient"
