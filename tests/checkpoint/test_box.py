"""Boxes match the parts of a DTensor as torch places them."""

import itertools
import random

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from megalith.checkpoint.box import Box, first_miscount, local_part
from megalith.errors import CheckpointError
from tests.effort import effort
from tests.rank_pool import ranks


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
    # without groups: ranks that created different numbers of them cannot agree on the name of the next
    other = torch.distributed.device_mesh.DeviceMesh("cpu", [0, 1], _init_backend=False)
    tensor = DTensor.from_local(torch.ones(1 if first else 0, 2), other, [Shard(0)], shape=(2, 2), stride=(2, 1))
    inside = distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)], src_data_rank=None)
    return local_part("w", tensor)[0].num_elements, local_part("w", inside)[0].num_elements


def test_a_rank_outside_the_mesh_holds_an_empty_box():
    assert ranks(4, outside_the_mesh) == [(2, 2), (2, 2), (0, 2), (0, 2)]


def refused_partial() -> str:
    tensor = DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (2,)), [Partial()])
    with pytest.raises(CheckpointError) as caught:
        local_part("w", tensor)
    return str(caught.value)


def test_a_placement_that_is_no_box_is_refused_by_name_with_the_way_out():
    for text in ranks(2, refused_partial):
        assert (
            text == "w: a tensor with placement P(sum) has no contiguous range per rank; redistribute it to Shard first"
        )


def wrong_local_size() -> str:
    tensor = DTensor.from_local(
        torch.ones(3, 2), init_device_mesh("cpu", (2,)), [Shard(0)], shape=(4, 2), stride=(2, 1)
    )
    with pytest.raises(CheckpointError) as caught:
        local_part("w", tensor)
    return str(caught.value)


def test_a_local_tensor_of_another_size_than_its_placements_say_is_refused():
    for text in ranks(2, wrong_local_size):
        assert "must have shape [2, 2], this rank's part of [4, 2] according to its placements; got [3, 2]" in text


def test_overlaps_and_places():
    saved, wanted = Box(((0, 4), (2, 6))), Box(((3, 9), (0, 4)))
    both = saved.overlap(wanted)
    assert both == Box(((3, 4), (2, 4)))
    assert both.slices_in(saved) == (slice(3, 4), slice(0, 2))
    assert both.slices_in(wanted) == (slice(0, 1), slice(2, 4))
    assert saved.overlap(Box(((4, 9), (2, 6)))) is None
    assert Box(()).overlap(Box(())) == Box(())  # a scalar has exactly one element
    assert Box(()).num_elements == 1


def counted(whole: Box, boxes: list[Box]) -> tuple[tuple[int, ...], int] | None:
    """``first_miscount``, computed element by element."""
    for element in itertools.product(*(range(*ends) for ends in whole.ranges)):
        count = sum(all(a <= i < b for i, (a, b) in zip(element, box.ranges, strict=True)) for box in boxes)
        if count != 1:
            return element, count
    return None


def tiles(chance: random.Random, box: Box, cuts: int) -> list[Box]:
    """``box`` cut in two, each half again, up to ``cuts`` cuts deep."""
    d = chance.randrange(len(box.ranges))
    start, stop = box.ranges[d]
    if cuts == 0 or stop - start < 2:
        return [box]
    at = chance.randrange(start + 1, stop)
    parts = [Box((*box.ranges[:d], ends, *box.ranges[d + 1 :])) for ends in ((start, at), (at, stop))]
    return [tile for part in parts for tile in tiles(chance, part, cuts - 1)]


@pytest.mark.parametrize("num_dimensions", [1, 2, 3])
def test_the_first_miscount_is_the_one_that_counting_finds(num_dimensions):
    chance = random.Random(0)
    whole = Box(tuple((i, i + 5) for i in range(num_dimensions)))
    for _ in range(60):
        boxes = tiles(chance, whole, 3)
        assert first_miscount(whole, boxes) is None
        assert first_miscount(whole, boxes[1:]) == counted(whole, boxes[1:]) is not None
        assert first_miscount(whole, [*boxes, boxes[-1]]) == counted(whole, [*boxes, boxes[-1]]) is not None
        moved = Box(tuple((max(a - 1, i), max(b - 1, i + 1)) for i, (a, b) in enumerate(boxes[-1].ranges)))
        assert first_miscount(whole, [*boxes[:-1], moved]) == counted(whole, [*boxes[:-1], moved])


def test_scalars_and_empty_tensors_are_tiled_by_one_box_and_by_none():
    assert first_miscount(Box(()), [Box(())]) is None
    assert first_miscount(Box(()), []) == ((), 0)
    assert first_miscount(Box.whole((0, 4)), []) is None


def test_the_work_grows_with_the_boxes_and_not_with_their_pairs_and_many_dimensions_are_refused():
    def lines(n: int) -> int:
        boxes = [Box(((i, i + 1), (j, j + 1), (0, 7))) for i in range(n) for j in range(n)]
        return effort(lambda: first_miscount(Box.whole((n, n, 7)), boxes)).lines

    assert lines(32) < 5 * lines(16)  # four times the boxes, sixteen times the pairs
    half = Box(((0, 1),) * 9)
    with pytest.raises(CheckpointError, match="split along at most 8 dimensions; got 9"):
        first_miscount(Box.whole((2,) * 9), [half])
