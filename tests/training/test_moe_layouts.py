"""Mixtures of experts learn in every layout what they learn in one process: float64, gloo ranks, two steps."""

from typing import Any

import pytest

from tests.rank_pool import ranks
from tests.tiny_run import settings
from tests.training.moe_options import OPTIONS
from tests.training.on_ranks import first_steps
from tests.training.reference import differences, reference

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "expert 2": (2, {"expert": 2}),
    "expert 2, gathered": (2, {"expert": 2, "dispatch": {"method": "all_gather"}}),
    "expert 2, in turns": (2, {"expert": 2, "dispatch": {"max_rows": 0.6}}),
    "tensor 2, sequence": (2, {"tensor": 2, "sequence": True}),
    "expert 2 x tensor 2, sequence, folded": (2, {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 1}),
    "expert 2 x context 2": (2, {"context": 2, "expert": 2}),
    "shard 2": (2, {"shard": 2}),
    "pipeline 2": (2, {"pipeline": 2}),
    "expert 4": (4, {"expert": 4}),
    "expert 2 x shard 2 of experts": (4, {"expert": 2}),
    "expert 2 x expert tensor 2": (4, {"expert": 2, "expert_tensor": 2}),
    "expert 2 x expert tensor 2, gathered": (
        4,
        {"expert": 2, "expert_tensor": 2, "dispatch": {"method": "all_gather"}},
    ),
    "expert 2 x tensor 2, sequence": (4, {"tensor": 2, "sequence": True, "expert": 2}),
    "expert 2 x pipeline 2": (4, {"pipeline": 2, "expert": 2}),
    "expert 2 x replicate 2": (4, {"replicate": 2, "expert": 2}),
    "expert 4 x expert tensor 2 x tensor 2 x context 2, in turns": (
        8,
        {
            "tensor": 2,
            "sequence": True,
            "context": 2,
            "expert": 4,
            "expert_tensor": 2,
            "dispatch": {"max_rows": 0.7},
        },
    ),
}
# `make test` has the layouts of test_moe_layout_cover.py, and from these what those lack: group-limited routing,
# balancing losses, folded ranks, and all axes of experts on eight ranks
IN_MAKE_TEST = {
    ("an even load by losses, and jitter", "shard 2"),
    ("experts of latents, with biases", "expert 2 x tensor 2, sequence, folded"),
    ("groups and a bias that evens loads", "expert 4"),
    ("experts in every layer", "expert 4 x expert tensor 2 x tensor 2 x context 2, in turns"),
}
CASES = [
    pytest.param(option, layout, marks=() if (option, layout) in IN_MAKE_TEST else pytest.mark.slow)
    for option in OPTIONS
    for layout in LAYOUTS
]


@pytest.mark.parametrize(("option", "layout"), CASES)
def test_experts_learn_the_same_in_every_layout(option, layout, tmp_path):
    num_ranks, parallel = LAYOUTS[layout]
    tree = settings(tmp_path, **OPTIONS[option])
    want = reference(tree)
    for rank, found in enumerate(ranks(num_ranks, first_steps, {**tree, "parallel": parallel}, num_ranks)):
        assert differences(found, want) == [], f"on rank {rank}"


UNEVEN: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "no dimension of a bias is even, experts are cut twice": (
        6,
        {"expert": 2},
        {"hidden_size": 48, "ffn_hidden_size": 32, "mlp_bias": True, "moe": {"num_experts": 4}},
    ),
    "latents are odd, and what is inside of the experts is cut": (
        4,
        {"expert": 2},
        {"moe": {"num_experts": 4, "latent_size": 7}},
    ),
}


@pytest.mark.parametrize(  # `make test` takes the one on four ranks
    "case", [pytest.param(case, marks=() if UNEVEN[case][0] == 4 else pytest.mark.slow) for case in UNEVEN]
)
def test_weights_of_experts_are_sharded_where_they_can_be(case, tmp_path):
    num_ranks, parallel, model = UNEVEN[case]
    tree = settings(tmp_path, train={"global_batch_size": 12, "micro_batch_size": 1})
    tree["model"] |= model
    want = reference(tree)
    for rank, found in enumerate(ranks(num_ranks, first_steps, {**tree, "parallel": parallel}, num_ranks)):
        assert differences(found, want) == [], f"on rank {rank}"
