"""FSDP2's communication for a unit of weights, by hand; on ranks: tests/training/test_traffic.py."""

import pytest
import torch

from megalith.config.layout import Layout
from megalith.parallel.sharding.traffic import Sharding, Weight
from megalith.parallel.traffic import Collective


def sharding(tp_rank: int = 0, **degrees: int) -> Sharding:
    return Sharding(Layout.resolve(**degrees), tp_rank, torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("weight", "degrees", "num_padded"),
    [
        (Weight((61, 32), split=0), {"shard": 4}, 64 * 32),  # without tp, dimension 0
        (Weight((61, 32), split=0), {"shard": 4, "tensor": 2}, 31 * 32),  # with tp, the other one
        (Weight((32, 48), split=1), {"shard": 4, "tensor": 2}, 32 * 24),
        (Weight((50,), split=0), {"shard": 4, "tensor": 2}, 28),  # 25, the only one
        (Weight((3,)), {"shard": 2, "context": 2, "tensor": 2}, 4),  # context shards too
    ],
)
def test_a_unit_is_gathered_and_reduced_with_its_padding(weight, degrees, num_padded):
    assert sharding(**degrees).unit_traffic([weight], num_gathers=6) == {
        Collective("shard", "all_gather", 2 * num_padded): 6,
        Collective("shard", "reduce_scatter", 4 * num_padded): 1,
    }


def test_the_weights_of_a_unit_travel_together():
    weights = [Weight((6, 4)), Weight((4,))]
    assert sharding(shard=2, replicate=2).unit_traffic(weights, num_gathers=1) == {
        Collective("shard", "all_gather", 2 * 28): 1,
        Collective("shard", "reduce_scatter", 4 * 28): 1,
        Collective("replicate", "all_reduce", 4 * 14): 1,
    }


def test_partial_gradients_are_summed_in_the_dtype_of_the_reduction():
    weights = [Weight((4,), partial=True), Weight((6, 4), partial=True), Weight((8,))]
    assert sharding(shard=1, tensor=2).unit_traffic(weights, 1) == {
        Collective("tensor", "all_reduce", 4 * 4): 1,
        Collective("tensor", "all_reduce", 4 * 24): 1,
    }


def test_a_shard_is_counted_without_padding():
    weight = Weight((61, 32), split=0)
    sizes = [sharding(shard=4).shard_bytes(weight, index) // 4 for index in range(4)]
    assert sizes == [16 * 32, 16 * 32, 16 * 32, 13 * 32]
    assert sharding(tp_rank=1, shard=4, tensor=2).shard_bytes(weight, 3) == 4 * 30 * 8
