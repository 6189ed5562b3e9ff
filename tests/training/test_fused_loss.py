"""train.fused_linear_cross_entropy: fused output projection and loss, in every layout."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megalith.config import load_run
from megalith.errors import ConfigError
from megalith.fusions import use
from megalith.parallel.tensor import cross_entropy
from megalith.parallel.tensor.cross_entropy import fused_linear_cross_entropy
from megalith.training.setup import RunParts, build_run
from tests.rank_pool import ranks
from tests.tiny_run import GPT2, settings
from tests.training.on_ranks import first_steps
from tests.training.reference import Trajectory, differences, reference

FUSED = {"fused_linear_cross_entropy": True}
CHUNK = 7  # tokens: the 32 of a micro-batch make several chunks and a partial one
PACKED = {"reset_attention_mask": True, "reset_position_ids": True}
TIED = {**GPT2, "ffn_hidden_size": None, "num_query_groups": None}
LAYOUTS: list[dict[str, Any]] = [
    {"tensor": 2, "sequence": True},
    {},
    {"tensor": 2},
    {"tensor": 4, "sequence": True},
    {"shard": 2},
    {"pipeline": 2},
    {"context": 2},
    {"pipeline": 2, "tensor": 2, "sequence": True},
    {"tensor": 2, "shard": 2},
    {"pipeline": 2, "tensor": 2, "context": 2},
]


def fused_steps(tree: dict[str, Any], world_size: int) -> tuple[Trajectory, int]:
    """The first steps with losses by chunks, in float64 too, and how many losses this rank has computed."""
    calls = 0

    def by_chunks(*inputs: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        with use("blocked"):
            return fused_linear_cross_entropy(*inputs, **{**options, "chunk_size": CHUNK})

    with patch.object(cross_entropy, "fused_linear_cross_entropy", by_chunks):
        return first_steps(tree, world_size), calls


@pytest.mark.parametrize("model", [TIED, pytest.param({}, marks=pytest.mark.slow)], ids=["gpt2, tied", "llama"])
@pytest.mark.parametrize(
    "parallel",
    [pytest.param(parallel, marks=[pytest.mark.slow] if number else []) for number, parallel in enumerate(LAYOUTS)],
    ids=str,
)
def test_it_computes_what_one_process_does(parallel, model, tmp_path):
    tree = settings(tmp_path, model=model, data=PACKED, train=FUSED, parallel=parallel)
    want = reference({name: group for name, group in tree.items() if name != "parallel"})
    size = 1
    for name in ("tensor", "context", "pipeline", "shard"):
        size *= parallel.get(name, 1)
    stages = parallel.get("pipeline", 1)
    samples = size // (parallel.get("tensor", 1) * parallel.get("context", 1) * stages)
    last = [rank >= size - size // stages for rank in range(size)]  # pipeline is the slowest axis
    for rank, (found, calls) in enumerate(ranks(size, fused_steps, tree, size)):
        assert differences(found, want) == [], f"on rank {rank}"
        # two steps of 8 samples, 2 per micro-batch
        assert calls == (2 * 8 // 2 // samples if last[rank] else 0)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight, bias)


def refusal(tree: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as refused:
        build_run(
            load_run(tree, world_size=dist.get_world_size()), torch.device("cpu"), RunParts(matrix_product=product)
        )
    return str(refused.value)


def test_with_another_matrix_product_it_is_refused_on_every_rank(tmp_path):
    for message in ranks(2, refusal, settings(tmp_path, train=FUSED)):
        assert "matrix_product='product'; use only one of the two" in message
