"""local_ranges: torch.chunk's split, and what DTensor and FSDP2 actually put on each rank."""

import functools
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from megalith.errors import ShapeError
from megalith.parallel.local_ranges import Ranges, chunk_range, local_ranges, ranges_of_placements
from tests.parallel.groups import Part, part, slice_of
from tests.rank_pool import ranks

mesh_of = functools.cache(functools.partial(init_device_mesh, "cpu"))

# name: (shape, mesh, placements, ranks that hold each element)
PLACED = {
    "even": ((8, 3), (4,), (Shard(0),), 1),
    "uneven": ((3, 7), (4,), (Shard(1),), 1),
    "a part is empty": ((9, 2), (4,), (Shard(0),), 1),
    "two parts are empty": ((2,), (4,), (Shard(0),), 1),
    "nothing at all": ((0, 4), (4,), (Shard(0),), 1),
    "replicated": ((5, 3), (4,), (Replicate(),), 4),
    "a scalar": ((), (4,), (Replicate(),), 4),
    "replicated and sharded": ((7, 3), (2, 2), (Replicate(), Shard(0)), 2),
    "both dimensions": ((7, 5), (2, 2), (Shard(1), Shard(0)), 1),
    "one dimension twice, left first": ((13, 2), (2, 2), (Shard(0), Shard(0)), 1),
    "three mesh dimensions": ((5, 7), (1, 2, 2), (Replicate(), Shard(1), Shard(0)), 1),
}


def covers(full: Tensor, parts: list[Part], copies: int) -> bool:
    """Whether each part has the values of its ranges, and the ranges contain every element ``copies`` times."""
    held = torch.zeros(full.shape, dtype=torch.int64)
    for where, values in parts:
        assert torch.equal(values, slice_of(full, where))
        slice_of(held, where).add_(1)
    return bool((held == copies).all())


def numbered(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


def placed(shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Placement, ...]) -> Part:
    return part(distribute_tensor(numbered(shape), mesh_of(mesh), placements, src_data_rank=None))


@given(st.integers(0, 50), st.integers(1, 9))
def test_a_split_is_that_of_torch_chunk(size, parts):
    chunks = torch.arange(size).chunk(parts)
    ranges = [range(*chunk_range(size, parts, index)) for index in range(parts)]
    assert [list(each) for each in ranges if each] == [chunk.tolist() for chunk in chunks if len(chunk)]
    assert sum(map(len, ranges)) == size


@given(st.data())
def test_ranges_are_those_of_dtensor_for_any_placements(data):
    shape = data.draw(st.lists(st.integers(0, 13), min_size=1, max_size=3))
    mesh_shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    placement = st.sampled_from([Replicate(), *(Shard(dim) for dim in range(len(shape)))])
    placements = data.draw(st.tuples(*[placement] * len(mesh_shape)))
    for coordinates in itertools.product(*map(range, mesh_shape)):
        found = ranges_of_placements(shape, mesh_shape, coordinates, placements)
        sizes, offsets = _compute_local_shape_and_global_offset(shape, mesh_shape, list(coordinates), placements)
        assert tuple(stop - start for start, stop in found) == sizes
        if all(sizes):
            assert tuple(start for start, _ in found) == offsets


def test_a_plain_tensor_is_held_whole():
    assert local_ranges(torch.empty(3, 0, 5)) == ((0, 3), (0, 0), (0, 5))
    assert local_ranges(torch.empty(())) == ()


@pytest.mark.parametrize("name", PLACED)
def test_each_rank_holds_the_values_of_its_ranges_and_together_they_hold_all(name):
    shape, mesh, placements, copies = PLACED[name]
    assert covers(numbered(shape), ranks(4, placed, shape, mesh, placements), copies)


def shard_over_tp_and_fsdp(shape: tuple[int, ...], tp_dim: int, mesh_shape: tuple[int, ...]) -> tuple[bool, Part]:
    """Whether FSDP2 marked the parameter as strided, and what this rank holds of it."""
    names = ("dp_replicate", "dp_shard", "tp")
    mesh: DeviceMesh = mesh_of(mesh_shape, mesh_dim_names=names)
    tensor = distribute_tensor(numbered(shape).double(), mesh["tp"], [Shard(tp_dim)], src_data_rank=None)
    model = nn.Module()
    model.weight = nn.Parameter(tensor)
    fully_shard(model, mesh=mesh["dp_shard"] if mesh_shape[0] == 1 else mesh["dp_replicate", "dp_shard"])
    assert isinstance(model.weight, DTensor)
    return any(isinstance(placement, _StridedShard) for placement in model.weight.placements), part(model.weight)


@pytest.mark.parametrize(
    ("shape", "tp_dim", "mesh", "copies", "strided"),
    [
        ((8,), 0, (1, 2, 2), 1, True),
        ((13,), 0, (1, 2, 2), 1, True),  # tp holds 7 and 6, which FSDP cuts into 4 + 3 and 3 + 3
        ((5,), 0, (1, 2, 2), 1, True),  # 3 and 2, then 2 + 1 and 1 + 1
        ((6, 4), 0, (1, 2, 2), 1, True),
        ((7, 5), 1, (1, 2, 2), 1, False),
        ((7,), 0, (2, 1, 2), 2, True),
    ],
)
def test_fsdp_over_what_tp_has_split_leaves_one_range_a_rank(shape, tp_dim, mesh, copies, strided):
    answers = ranks(4, shard_over_tp_and_fsdp, shape, tp_dim, mesh)
    assert {marked for marked, _ in answers} == {strided}, "this torch marks the split in another way"
    assert covers(numbered(shape).double(), [held for _, held in answers], copies)


def ranges_on_a_mesh_of_rank_0() -> Ranges:
    mesh = DeviceMesh("cpu", [0], _init_backend=False)
    return local_ranges(DTensor.from_local(torch.ones(3 if mesh.get_coordinate() else 0), mesh, [Shard(0)]))


def test_a_rank_outside_of_the_mesh_holds_nothing():
    assert ranks(2, ranges_on_a_mesh_of_rank_0) == [((0, 3),), ((0, 0),)]


def refuse_a_partial_tensor() -> None:
    with pytest.raises(
        ShapeError, match=r"a tensor with placement P\(sum\) has no contiguous range per rank; redistribute it to Shard"
    ):
        local_ranges(DTensor.from_local(torch.ones(3), mesh_of((2,)), [Partial()]))


def test_a_term_of_a_sum_has_no_range():
    ranks(2, refuse_a_partial_tensor)
