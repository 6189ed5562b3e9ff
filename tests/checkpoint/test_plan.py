"""The plan: every element is written once, the work is spread over replicas, and disagreements are detected."""

import pytest

from megalith.checkpoint.box import Box
from megalith.checkpoint.plan import Offer, plan_of
from megalith.errors import CheckpointError


def offer(name: str, *ranges: tuple[int, int], shape: tuple[int, ...] = (8,), dtype: str = "float32") -> Offer:
    return Offer(name, shape, dtype, Box(ranges))


def test_a_replicated_tensor_is_written_once_and_replicas_are_spread_by_bytes():
    names = [f"w{i}" for i in range(8)]
    plan = plan_of([[offer(name, (0, 8)) for name in names]] * 4)
    assert sorted(name for written in plan.names_by_rank for name in written) == names
    assert [len(written) for written in plan.names_by_rank] == [2, 2, 2, 2]
    assert plan.num_bytes == 8 * 8 * 4


def test_a_sharded_tensor_is_written_where_it_is_held():
    plan = plan_of([[offer("w", (0, 5))], [offer("w", (5, 8))]])
    assert plan.names_by_rank == [["w"], ["w"]]
    assert [(piece.file, piece.key, piece.box) for piece in plan.tensors["w"].pieces] == [
        ("shard-00000-of-00002.safetensors", "w@0:5", Box(((0, 5),))),
        ("shard-00001-of-00002.safetensors", "w@5:8", Box(((5, 8),))),
    ]


def test_a_tensor_of_one_stage_needs_no_other_rank():
    plan = plan_of([[offer("first", (0, 8))], [offer("last", (0, 8))]])
    assert plan.names_by_rank == [["first"], ["last"]]


def test_an_empty_box_is_not_written_and_an_empty_tensor_is_known():
    plan = plan_of([[offer("w", (0, 8)), offer("none", (0, 0), shape=(0,))], [offer("w", (8, 8))]])
    assert plan.names_by_rank == [["w"], []]
    assert plan.tensors["none"].shape == (0,)
    assert plan.tensors["none"].pieces == ()


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            offer("w", (0, 8)),
            offer("w", (0, 9), shape=(9,)),
            r"w is float32 \[8\] on one rank and float32 \[9\] on",
        ),
        (offer("w", (0, 8)), offer("w", (0, 8), dtype="int64"), r"float32 \[8\] on one rank and int64 \[8\] on rank 1"),
        (offer("w", (0, 3)), offer("w", (4, 8)), r"w has 8 elements, but the ranks together hold 7, in 2 boxes"),
        (offer("w", (0, 8)), offer("w", (4, 8)), r"w has 8 elements, but the ranks together hold 12, in 2 boxes"),
        (offer("w@0", (0, 8)), offer("w", (0, 8)), r"may not be named 'w@0'"),
        (offer("__metadata__", (0, 8)), offer("w", (0, 8)), r"may not be named '__metadata__'"),
        (offer("w", (0, 8), dtype="complex64"), offer("v", (0, 8)), r"w: dtype must be one of float64.*got complex64"),
    ],
)
def test_what_the_format_cannot_hold_is_refused(first, second, message):
    with pytest.raises(CheckpointError, match=message):
        plan_of([[first], [second]])


def square(*ranges: tuple[int, int]) -> Offer:
    return offer("w", *ranges, shape=(4, 4))


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        (
            [offer("w", (0, 4)), offer("w", (3, 7))],
            r"each element of w must be in exactly one of the 2 boxes that the ranks hold; \[3\] is in 2",
        ),
        ([offer("w", (1, 5)), offer("w", (4, 8))], r"one of the 2 boxes .*; \[0\] is in 0$"),
        # the upper rows are complete; in the lower ones, one column occurs twice and another is missing
        (
            [square((0, 2), (0, 4)), square((2, 4), (0, 2)), square((2, 4), (1, 3))],
            r"one of the 3 boxes .*; \[2, 1\] is in 2$",
        ),
    ],
)
def test_an_overlap_with_a_gap_of_the_same_size_is_refused(boxes, message):
    with pytest.raises(CheckpointError, match=message):
        plan_of([[box] for box in boxes])


def test_a_pinwheel_that_no_straight_cut_divides_is_a_whole():
    ranges = [((0, 1), (0, 3)), ((0, 3), (3, 4)), ((3, 4), (1, 4)), ((1, 4), (0, 1)), ((1, 3), (1, 3))]
    assert len(plan_of([[square(*box)] for box in ranges]).tensors["w"].pieces) == 5
