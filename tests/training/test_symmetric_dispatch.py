"""Runs whose experts exchange tokens through (a stand-in for) symmetric memory learn what one process learns."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megalith.config import load_run
from megalith.errors import ConfigError
from megalith.insight.verify.experts import experts_not_shown
from megalith.observe.units import quantity
from megalith.training import machine_fit, setup
from megalith.training.dry_run import describe
from megalith.training.machine_fit import check_machine, rank_state_bytes
from megalith.training.setup import build_run
from megalith.training.tasks.choose import task_of
from tests.parallel.expert.symmetric_standin import StandInMemory
from tests.rank_pool import RankError, ranks
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
    pytest.param("experts of latents, with biases", "expert 2 x tensor 2, sequence, folded", marks=pytest.mark.slow),
    ("the mixture computed again", "expert 2 x context 2"),
    pytest.param(
        "experts in every other layer, shared ones with a gate", "expert 2 x pipeline 2", marks=pytest.mark.slow
    ),
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


def allocated(tree: dict[str, Any], num_ranks: int) -> tuple[list[tuple[int, ...]], int]:
    """The shapes of this rank's row buffers, and the bytes of all of its symmetric memory."""
    with patch.object(setup, "nvshmem_memory", lambda group, device: StandInMemory(group)):
        a2a = build_run(load_run(tree, world_size=num_ranks), torch.device("cpu")).options.symmetric_a2a
    tensors = a2a.memory.tensors
    return [tuple(tensor.shape) for tensor in tensors[:2]], sum(x.numel() * x.element_size() for x in tensors)


# rows of 32 float64 features and two elements for the weight; 2 sequences of 16 tokens, K = 2 or 3 of 4 experts
@pytest.mark.parametrize(
    ("parallel", "top_k", "num_sent", "num_received"),
    [
        ({"expert": 2}, 2, 32 * 2, 2 * 32 * 2 + 2),
        ({"expert": 2}, 3, 32 * 3, 2 * 32 * 2 + 2),  # at most two of three experts are here
        ({"expert": 2, "tensor": 2, "sequence": True, "expert_tensor": 1}, 2, 16 * 2, 2 * 16 * 2 + 2),
        ({"expert": 2, "context": 2}, 2, 16 * 2, 2 * 16 * 2 + 2),
    ],
)
def test_buffers_are_as_large_as_the_worst_case_and_are_counted(parallel, top_k, num_sent, num_received, tmp_path):
    tree = run_of(settings(tmp_path, model={"moe": {"num_experts": 4, "top_k": top_k}}), parallel)
    num_bytes = 8 * (34 * (num_sent + num_received) + 4 + 3 * 2 * 4)
    assert ranks(2, allocated, tree, 2) == [([(num_sent, 34), (num_received, 34)], num_bytes)] * 2
    config = load_run(tree, world_size=2)
    assert f"exchange buffers      {quantity(num_bytes)}B on each rank, in symmetric memory\n" in describe(config, 2)
    takes = sum(held.total for held in rank_state_bytes(config, task_of(config), 2)) * 2 + 2 * num_bytes
    with patch.object(machine_fit, "memory_bytes", lambda: takes):
        check_machine(config, 2, range(2))
    said = rf"with {quantity(num_bytes)}B each for parallel.dispatch.method=symmetric, without activations"
    with patch.object(machine_fit, "memory_bytes", lambda: takes - 1), pytest.raises(ConfigError, match=said):
        check_machine(config, 2, range(2))


class Short(StandInMemory):
    """Memory for the rows that are sent but, on rank 1, for nothing more."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = super().empty(shape, dtype)  # like NVSHMEM's, an allocation waits for all ranks before it fails
        if len(self.tensors) > 1 and dist.get_rank() == 1:
            raise torch.OutOfMemoryError("nvshmem_malloc failed")
        return tensor


def refusal_of_short_memory(tree: dict[str, Any]) -> str:
    with patch.object(setup, "nvshmem_memory", lambda group, device: Short(group)):
        return refusal(tree)


def test_buffers_that_one_rank_cannot_have_are_refused_on_all_by_the_name_of_their_setting(tmp_path):
    tree = run_of(settings(tmp_path, **OPTIONS["experts in every layer"]), {"expert": 2})
    for message in ranks(2, refusal_of_short_memory, tree):
        assert "rank 1: parallel.dispatch.method=symmetric cannot allocate its buffers of 53.0kB: " in message
        assert "nvshmem_malloc failed; use a smaller train.micro_batch_size" in message


class Broken(StandInMemory):
    """Memory that fails on rank 1 for an unexpected reason, while rank 0 waits for it."""

    fails_in = "empty"

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self._fail("empty")
        return super().empty(shape, dtype)

    def rendezvous(self, tensor: torch.Tensor) -> None:
        self._fail("rendezvous")
        super().rendezvous(tensor)

    def barrier(self) -> None:
        self._fail("barrier")
        super().barrier()

    def _fail(self, call: str) -> None:
        if call == self.fails_in and dist.get_rank() == 1:
            raise RuntimeError(f"a defect in {call}")


def build_with_broken_memory(tree: dict[str, Any], fails_in: str) -> None:
    Broken.fails_in = fails_in
    with patch.object(setup, "nvshmem_memory", lambda group, device: Broken(group)):
        build_run(load_run(tree, world_size=2), torch.device("cpu"))


@pytest.mark.parametrize("fails_in", ["empty", "rendezvous", "barrier"])
def test_an_unforeseen_error_of_the_memory_ends_its_rank_at_once_and_keeps_its_type(fails_in, tmp_path):
    tree = run_of(settings(tmp_path, **OPTIONS["experts in every layer"]), {"expert": 2})
    with pytest.raises(RankError, match=rf"rank 1(.|\n)*\n *RuntimeError: a defect in {fails_in}"):
        ranks(2, build_with_broken_memory, tree, fails_in, timeout=20)


def test_verify_says_that_it_runs_another_exchange(tmp_path):
    tree = run_of(settings(tmp_path, **OPTIONS["experts in every layer"]), {"expert": 2})
    said = list(experts_not_shown(load_run(tree, world_size=2), [{"expert": 2}]))
    assert said == [
        "parallel.dispatch.method=symmetric: symmetric memory needs several GPUs; all_to_all was used instead",
    ]


def refusal(tree: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        build_run(load_run(tree, world_size=2), torch.device("cpu"))
    return str(caught.value)


def test_a_run_on_cpus_is_refused_on_every_rank(tmp_path):
    tree = run_of(settings(tmp_path, **OPTIONS["experts in every layer"]), {"expert": 2})
    for message in ranks(2, refusal, tree):
        assert "but this run is on cpu; use parallel.dispatch.method=all_to_all" in message
