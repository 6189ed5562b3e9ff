"""Runs whose experts exchange through symmetric memory, a stand-in for it, learn what one process learns."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

from megalith.config import load_run
from megalith.errors import ConfigError
from megalith.insight.verify.experts import experts_not_shown
from megalith.training import setup
from megalith.training.setup import build_run
from tests.parallel.expert.symmetric_standin import StandInMemory
from tests.rank_pool import ranks
from tests.tiny_run import settings
from tests.training.moe_options import OPTIONS
from tests.training.on_ranks import first_steps
from tests.training.reference import Trajectory, differences, reference

SYMMETRIC = {"dispatch": {"method": "symmetric"}}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "expert 2": (2, {"expert": 2}),
    "expert 2 x tensor 2, sequence, folded": (2, {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 1}),
    "expert 2 x context 2": (2, {"context": 2, "expert": 2}),
    "expert 2 x pipeline 2": (4, {"pipeline": 2, "expert": 2}),
}
LAST_LAYER = {"num_layers": 2, "moe": {"num_experts": 4, "layers": [False, True]}}
CASES = [
    ("experts in every layer", "expert 2"),
    ("experts of latents, with biases", "expert 2 x tensor 2, sequence, folded"),
    ("the mixture computed again", "expert 2 x context 2"),
    ("experts in every other layer, shared ones with a gate", "expert 2 x pipeline 2"),
]


def run_of(tree: dict[str, Any], parallel: dict[str, Any]) -> dict[str, Any]:
    return {**tree, "experimental": ["symmetric_memory"], "parallel": {**parallel, **SYMMETRIC}}


def with_stand_in(tree: dict[str, Any], world_size: int) -> Trajectory:
    with patch.object(setup, "nvshmem_memory", lambda group, device: StandInMemory(group)):
        return first_steps(tree, world_size)


@pytest.mark.parametrize(("option", "layout"), CASES)
def test_experts_learn_the_same_in_every_layout(option, layout, tmp_path):
    num_ranks, parallel = LAYOUTS[layout]
    tree = settings(tmp_path, **OPTIONS[option])
    want = reference(tree)
    for rank, found in enumerate(ranks(num_ranks, with_stand_in, run_of(tree, parallel), num_ranks)):
        assert differences(found, want) == [], f"on rank {rank}"


def test_a_stage_without_experts_does_not_leave_the_others_waiting(tmp_path):
    tree = run_of(settings(tmp_path, model=LAST_LAYER), {"pipeline": 2, "expert": 2})
    want = reference(tree)
    for rank, found in enumerate(ranks(4, with_stand_in, tree, 4)):
        assert differences(found, want) == [], f"on rank {rank}"


def test_verify_says_that_it_runs_another_exchange(tmp_path):
    tree = run_of(settings(tmp_path, **OPTIONS["experts in every layer"]), {"expert": 2})
    said = list(experts_not_shown(load_run(tree, world_size=2), [{"expert": 2}]))
    assert said == [
        "parallel.dispatch.method=symmetric: symmetric memory needs several GPUs; all_to_all was run",
    ]


def refusal(tree: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        build_run(load_run(tree, world_size=2), torch.device("cpu"))
    return str(caught.value)


def test_a_run_on_cpus_is_refused_on_every_rank(tmp_path):
    tree = run_of(settings(tmp_path, **OPTIONS["experts in every layer"]), {"expert": 2})
    for message in ranks(2, refusal, tree):
        assert "and this run is on cpu; use parallel.dispatch.method=all_to_all" in message
