"""A checkpoint of experts is read in any other division of them: the same weights, moments, biases and forward."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from megalith.config import load_run
from megalith.training.resume import resume_or_load, save
from megalith.training.setup import build_run
from megalith.training.step import local_counts, sum_totals, train_step
from tests.rank_pool import ranks
from tests.tiny_run import settings

EXACT = 1e-12  # section 16.2 of the specification
MOE = {
    "num_experts": 4,
    "shared_ffn_hidden_size": 16,
    "router": {"score_function": "sigmoid", "expert_bias_update_rate": 0.05},
}
WRITER = (2, {"expert": 2})
READERS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "expert 4": (4, {"expert": 4}),
    "expert 2 x expert tensor 2": (4, {"expert": 2, "expert_tensor": 2}),
    "expert 2 x expert tensor 2 x tensor 2": (4, {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 2}),
}
Found = tuple[dict[str, torch.Tensor], float]


def two_steps_saved(tree: dict[str, Any], num_ranks: int) -> Found:
    run = build_run(load_run(tree, world_size=num_ranks), torch.device("cpu"))
    for _ in range(2):
        step_of(run)
    save(run, keep_last=1)
    return tensors_of(run), step_of(run)


def read_here(tree: dict[str, Any], num_ranks: int) -> Found:
    """What this rank has read, whole, and the loss of the step after it."""
    run = build_run(load_run(tree, world_size=num_ranks), torch.device("cpu"))
    resume_or_load(run)
    assert run.state.step == 2
    return tensors_of(run), step_of(run)


def step_of(run: Any) -> float:
    consumed, train = run.state.consumed_samples, run.config.train
    micro_batches = run.loader.batch(consumed, run.microbatches.global_batch_size(consumed), train.micro_batch_size)
    totals = sum_totals(run, local_counts(run, micro_batches), stop=False)
    return train_step(run, micro_batches, totals.counts).loss


def tensors_of(run: Any) -> dict[str, torch.Tensor]:
    """Weights, biases that choices are made by, and AdamW's moments."""
    return {name: _whole(tensor) for name, tensor in run.tensors().items()}


@pytest.mark.parametrize(
    "reader", [pytest.param(name, marks=() if n % 2 == 0 else pytest.mark.slow) for n, name in enumerate(READERS)]
)
def test_experts_are_read_in_another_division(reader, written):
    folder, want, next_loss = written
    num_ranks, parallel = READERS[reader]
    tree = settings(folder, model={"moe": MOE}, parallel=parallel)
    for found, loss in ranks(num_ranks, read_here, tree, num_ranks):
        assert found.keys() == want.keys()
        for name, tensor in want.items():
            assert torch.equal(found[name], tensor), name
        assert loss == pytest.approx(next_loss, rel=EXACT, abs=0)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor], float]:
    """The folder of a run of two steps on two ranks, all that it saved, and the loss of its third step."""
    folder = tmp_path_factory.mktemp("experts")
    num_ranks, parallel = WRITER
    tree = settings(folder, model={"moe": MOE}, parallel=parallel)
    (want, loss), _ = ranks(num_ranks, two_steps_saved, tree, num_ranks)
    names = ["experts.down_proj", "gate.e_score_correction_bias"]
    kinds = ["model.layers.0.mlp", "optimizer.exp_avg_sq.model.layers.0.mlp"]
    assert {f"{kinds[0]}.{name}" for name in names} | {f"{kinds[1]}.{names[0]}"} <= want.keys()
    assert want[f"{kinds[0]}.{names[1]}"].any()
    return folder, want, loss


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
