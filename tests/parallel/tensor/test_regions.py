"""regions: entering and leaving give the same numbers with and without sequence parallelism, also in backward."""

import pytest
import torch
import torch.distributed as dist

from megalith.parallel.tensor.regions import enter_tensor_parallel, leave_tensor_parallel
from tests.rank_pool import ranks

S = 4


def through_a_region(sequence_parallel: bool) -> tuple[list[float], list[float]]:
    """x -> enter -> x * (rank + 1) -> leave, with output gradients 0, 1, 2 ...: this rank's output and dx."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    x, dy = torch.arange(1.0, S + 1), torch.arange(float(S))  # [S]
    if sequence_parallel:
        x, dy = x.chunk(size)[rank], dy.chunk(size)[rank]
    x = x.clone().requires_grad_()
    y = leave_tensor_parallel(enter_tensor_parallel(x, group, sequence_parallel) * (rank + 1), group, sequence_parallel)
    y.backward(dy)
    return y.tolist(), x.grad.tolist()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_region_sums_what_its_ranks_compute_and_so_does_its_backward(num_ranks):
    factor = sum(range(1, num_ranks + 1))
    y, dx = [factor * v for v in (1.0, 2.0, 3.0, 4.0)], [factor * v for v in (0.0, 1.0, 2.0, 3.0)]
    assert ranks(num_ranks, through_a_region, False) == [(y, dx)] * num_ranks
    part = S // num_ranks
    assert ranks(num_ranks, through_a_region, True) == [
        (y[start : start + part], dx[start : start + part]) for start in range(0, S, part)
    ]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_without_a_group_nothing_happens(sequence_parallel):
    x = torch.ones(S)
    assert enter_tensor_parallel(x, None, sequence_parallel) is x
    assert leave_tensor_parallel(x, None, sequence_parallel) is x
