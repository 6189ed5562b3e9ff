"""Experts learn under every schedule of a pipeline what they learn in one process: float64, gloo ranks, two steps."""

from typing import Any

import pytest

from tests.rank_pool import ranks
from tests.tiny_run import settings
from tests.training.on_ranks import first_steps
from tests.training.reference import differences, reference

# two of four layers have experts: with one layer per stage, some stages have none
MODEL: dict[str, Any] = {
    "num_layers": 4,
    "moe": {
        "num_experts": 4,
        "layers": [False, True],
        "shared_ffn_hidden_size": 16,
        "router": {
            "score_function": "sigmoid",
            "expert_bias_update_rate": 0.05,
            "sequence_balance": 0.3,
            "z_loss": 0.1,
        },
    },
}
V = {"pipeline": 2, "virtual": 2, "schedule": "zb_v"}
INTERLEAVED = {"pipeline": 2, "virtual": 2, "schedule": "interleaved"}
LAYOUTS: dict[str, tuple[int, dict[str, Any], list[str]]] = {
    "zero_bubble x expert 2": (4, {"pipeline": 2, "schedule": "zero_bubble", "expert": 2}, []),
    "zb_v": (2, V, []),
    "zb_v x expert 2": (4, {**V, "expert": 2}, []),
    "zb_v x expert 2, experts computed again": (4, {**V, "expert": 2}, ["moe"]),
    "interleaved": (2, INTERLEAVED, []),
    "interleaved x expert 2, MLPs and activations computed again": (
        4,
        {**INTERLEAVED, "expert": 2},
        ["mlp", "moe_act"],
    ),
    "zb_v x tensor 2 x expert 2": (4, {**V, "tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 1}, []),
    "zero_bubble, 4 stages, x expert tensor 2": (8, {"pipeline": 4, "schedule": "zero_bubble", "expert_tensor": 2}, []),
    "interleaved x expert 2 x expert tensor 2, in turns": (
        8,
        {**INTERLEAVED, "expert": 2, "expert_tensor": 2, "dispatch": {"max_rows": 0.6}},
        [],
    ),
}
IN_MAKE_TEST = ("zb_v", "interleaved x expert 2, MLPs and activations computed again")  # split backwards, whole ones


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in IN_MAKE_TEST else pytest.mark.slow) for name in LAYOUTS]
)
def test_experts_learn_the_same_under_every_schedule(layout, tmp_path):
    num_ranks, parallel, again = LAYOUTS[layout]
    train = {"global_batch_size": 16, "micro_batch_size": 1}
    tree = settings(tmp_path, model=MODEL, train=train)
    want = reference(tree)
    recompute = {"recompute": "selective", "recompute_modules": again} if again else {}
    here = {**tree, "parallel": parallel, "train": {**tree["train"], **recompute}}
    for rank, found in enumerate(ranks(num_ranks, first_steps, here, num_ranks)):
        assert differences(found, want) == [], f"on rank {rank}"
