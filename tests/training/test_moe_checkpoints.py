"""A checkpoint of experts can be read in any other expert layout: same weights, moments, biases and forward."""

from collections.abc import Callable
from functools import cache
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
MODEL: dict[str, Any] = {"num_layers": 4, "moe": MOE}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "expert 2": (2, {"expert": 2}),
    "expert 4": (4, {"expert": 4}),
    "expert 2 x expert tensor 2": (4, {"expert": 2, "expert_tensor": 2}),
    "expert 2 x expert tensor 2 x tensor 2": (4, {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 2}),
    "pipeline 2 x expert 2": (4, {"pipeline": 2, "expert": 2}),
    "interleaved x expert tensor 2": (4, {"pipeline": 2, "virtual": 2, "expert_tensor": 2}),
    "zb_v": (2, {"pipeline": 2, "virtual": 2, "schedule": "zb_v"}),
}
# writer and reader
PAIRS = [
    ("expert 2", "alone"),
    ("expert 2", "expert 2 x expert tensor 2"),
    ("pipeline 2 x expert 2", "expert 2 x expert tensor 2"),
    ("expert 2 x expert tensor 2", "interleaved x expert tensor 2"),
    ("expert 2", "expert 4"),
    ("expert 2", "expert 2 x expert tensor 2 x tensor 2"),
    ("pipeline 2 x expert 2", "alone"),
    ("pipeline 2 x expert 2", "expert 4"),
    ("pipeline 2 x expert 2", "zb_v"),
    ("expert 2 x expert tensor 2", "pipeline 2 x expert 2"),
    ("interleaved x expert tensor 2", "expert 2 x expert tensor 2 x tensor 2"),
    ("interleaved x expert tensor 2", "pipeline 2 x expert 2"),
    ("zb_v", "expert 2"),
]
# from divided experts to undivided ones, and from stages to ranks that split an expert
IN_MAKE_TEST = (PAIRS[0], PAIRS[2])
Found = tuple[dict[str, torch.Tensor], float]
Written = tuple[Path, dict[str, torch.Tensor], float]


def two_steps_saved(tree: dict[str, Any], num_ranks: int) -> Found:
    run = build_run(load_run(tree, world_size=num_ranks), torch.device("cpu"))
    for _ in range(2):
        step_of(run)
    save(run, keep_last=1)
    return tensors_of(run), step_of(run)


def read_here(tree: dict[str, Any], num_ranks: int) -> Found:
    """The tensors this rank has read, unsharded, and the loss of the following step."""
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
    """Weights, the routers' expert biases, and AdamW's moments."""
    return {name: _whole(tensor) for name, tensor in run.tensors().items()}


@pytest.mark.parametrize(
    ("writer", "reader"),
    [pytest.param(*pair, marks=() if pair in IN_MAKE_TEST else pytest.mark.slow) for pair in PAIRS],
)
def test_experts_are_read_in_another_division(writer, reader, written):
    folder, want, next_loss = written(writer)
    num_ranks, parallel = LAYOUTS[reader]
    tree = settings(folder, model=MODEL, parallel=parallel)
    read: set[str] = set()
    for found, loss in ranks(num_ranks, read_here, tree, num_ranks):
        for name, tensor in found.items():
            assert torch.equal(tensor, want[name]), name
        read |= found.keys()  # of this rank's own stages
        assert loss == pytest.approx(next_loss, rel=EXACT, abs=0)
    assert read == want.keys()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Written]:
    """A run of two steps in a layout, run once: its folder, all that it saved, and the loss of a third step."""

    @cache
    def write(writer: str) -> Written:
        folder = tmp_path_factory.mktemp("experts")
        num_ranks, parallel = LAYOUTS[writer]
        tree = settings(folder, model=MODEL, parallel=parallel)
        found = ranks(num_ranks, two_steps_saved, tree, num_ranks)
        want = {name: tensor for tensors, _ in found for name, tensor in tensors.items()}
        layers = [f"model.layers.{layer}.mlp" for layer in range(4)]
        biases = [f"{layer}.gate.e_score_correction_bias" for layer in layers]
        experts = [f"{kind}{layer}.experts.down_proj" for kind in ("", "optimizer.exp_avg_sq.") for layer in layers]
        assert {*biases, *experts} <= want.keys()
        assert all(want[name].any() for name in experts)
        assert any(want[name].abs().max() > 0.01 for name in biases)  # where the second step has not undone the first
        return folder, want, found[0][1]

    return write


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
