"""Boxes are where torch puts the parts of a DTensor."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from megalith.checkpoint.boxes import Box, box_of_placements, local_part
from megalith.errors import CheckpointError
from tests.rank_pool import ranks


@given(st.data())
def test_boxes_are_those_of_dtensor_for_any_placements(data):
    shape = data.draw(st.lists(st.integers(0, 13), min_size=1, max_size=3))
    mesh_shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    placement = st.sampled_from([Replicate(), *(Shard(dim) for dim in range(len(shape)))])
    placements = data.draw(st.tuples(*[placement] * len(mesh_shape)))
    for coordinates in itertools.product(*map(range, mesh_shape)):
        box = box_of_placements("w", shape, mesh_shape, coordinates, placements)
        sizes, offsets = _compute_local_shape_and_global_offset(shape, mesh_shape, list(coordinates), placements)
        assert box.shape == sizes
        if box.num_elements:
            assert tuple(start for start, _ in box.ranges) == offsets


@pytest.mark.parametrize(("size", "num_ranks"), [(13, 4), (5, 4), (2, 4), (8, 4), (7, 3)])
def test_one_dimension_is_cut_as_torch_chunk_does(size, num_ranks):
    chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(num_ranks)]
    boxes = [box_of_placements("w", [size], [num_ranks], [rank], [Shard(0)]) for rank in range(num_ranks)]
    cut = [list(range(*box.ranges[0])) for box in boxes]
    assert cut == chunks + [[]] * (num_ranks - len(chunks))


def parts_of_two_dims_on_one() -> bool:
    mesh = init_device_mesh("cpu", (2, 2))
    full = torch.arange(7 * 3).reshape(7, 3)
    tensor = distribute_tensor(full, mesh, [Shard(0), Shard(0)], src_data_rank=None)
    box, local = local_part("w", tensor)
    return torch.equal(full[box.slices_in(Box.whole(full.shape))], local)


def test_two_mesh_dimensions_on_one_tensor_dimension_give_the_part_that_is_held():
    assert all(ranks(4, parts_of_two_dims_on_one))


def outside_the_mesh() -> tuple[int, ...]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))["tp"]
    first = torch.distributed.get_rank() < 2
    other = torch.distributed.device_mesh.DeviceMesh("cpu", [0, 1])
    tensor = DTensor.from_local(torch.ones(1 if first else 0, 2), other, [Shard(0)], shape=(2, 2), stride=(2, 1))
    inside = distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)], src_data_rank=None)
    return local_part("w", tensor)[0].num_elements, local_part("w", inside)[0].num_elements


def test_a_rank_outside_the_mesh_holds_an_empty_box():
    assert ranks(4, outside_the_mesh) == [(2, 2), (2, 2), (0, 2), (0, 2)]


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (_StridedShard(0, split_factor=2), r"w: FSDP and tensor parallelism shard one dimension.*shard_placement_fn"),
        (Partial(), r"w: .* holds unreduced sums; redistribute it to Shard or Replicate first"),
    ],
)
def test_a_placement_that_is_no_box_is_refused_with_the_way_out(placement, message):
    with pytest.raises(CheckpointError, match=message):
        box_of_placements("w", [8], [2], [0], [placement])


def wrong_local_size() -> str:
    tensor = DTensor.from_local(
        torch.ones(3, 2), init_device_mesh("cpu", (2,)), [Shard(0)], shape=(4, 2), stride=(2, 1)
    )
    with pytest.raises(CheckpointError) as caught:
        local_part("w", tensor)
    return str(caught.value)


def test_a_local_tensor_of_another_size_than_its_placements_say_is_refused():
    for text in ranks(2, wrong_local_size):
        assert "of shape [4, 2] give this rank [2, 2], and its local tensor is [3, 2]" in text


def test_overlaps_and_places():
    saved, wanted = Box(((0, 4), (2, 6))), Box(((3, 9), (0, 4)))
    both = saved.overlap(wanted)
    assert both == Box(((3, 4), (2, 4)))
    assert both.slices_in(saved) == (slice(3, 4), slice(0, 2))
    assert both.slices_in(wanted) == (slice(0, 1), slice(2, 4))
    assert saved.overlap(Box(((4, 9), (2, 6)))) is None
    assert Box(()).overlap(Box(())) == Box(())  # a scalar has one element, and it is all of it
    assert Box(()).num_elements == 1
