"""An error on one rank ends all ranks: with the same error if it was foreseen, otherwise with its own traceback."""

import errno
import os
import traceback

import pytest
import torch
import torch.distributed as dist

from megalith.errors import CheckpointError, MegalithError, MissingFileError, StorageError
from megalith.topology.agreement import agreed, all_gather, attempt, broadcast, everywhere, gather, scatter
from tests.rank_pool import ranks


def errors_of(failing: dict[int, Exception]) -> tuple[str, bool, bool]:
    """The error on this rank, whether its cause is the one that was raised here, and whether every rank has it."""
    error = failing.get(dist.get_rank())
    try:
        with agreed("saving"):
            if error is not None:
                raise error
    except MegalithError as found:
        return repr(found), found.__cause__ is error, found.on_every_rank
    return "none", True, True


@pytest.mark.parametrize(
    ("failing", "everywhere"),
    [
        ({}, "none"),
        ({1: CheckpointError("no such tensor")}, "CheckpointError('saving: rank 1: no such tensor')"),
        ({0: StorageError("full"), 1: StorageError("full")}, "StorageError('saving: full')"),
        (
            {0: CheckpointError("no"), 1: MissingFileError("gone")},
            "MissingFileError('saving: rank 0: no; rank 1: gone')",
        ),
    ],
)
def test_all_ranks_end_alike(failing, everywhere):
    assert ranks(2, errors_of, failing) == [(everywhere, True, True)] * 2


def test_ranks_are_named_unless_all_have_the_error():
    error = CheckpointError("no")
    some, every = {0: error, 2: error}, {0: error, 1: error, 2: error}
    assert {text for text, *_ in ranks(3, errors_of, some)} == {"CheckpointError('saving: ranks 0, 2: no')"}
    assert {text for text, *_ in ranks(3, errors_of, every)} == {"CheckpointError('saving: no')"}


def agreed_again_after_rank_1(same: bool) -> str:
    """The error on this rank after ranks have agreed on one, which rank 0 alone, or every rank, brings up again."""
    found = None
    try:
        with agreed("saving"):
            if dist.get_rank() == 1:
                raise StorageError("full")
    except StorageError as error:
        found = error
    try:
        with agreed():
            if found is not None and (same or dist.get_rank() == 0):
                raise found
    except StorageError as error:
        return str(error)
    return "none"


@pytest.mark.parametrize("same", [False, True])
def test_an_error_that_was_agreed_on_names_its_ranks_once(same):
    assert ranks(3, agreed_again_after_rank_1, same) == ["saving: rank 1: full"] * 3


def fails_unforeseen_on_rank_1(error: BaseException, collective: bool) -> tuple[str, bool]:
    """The error on this rank, and whether its traceback shows the line that raised."""

    def go_wrong() -> None:
        if dist.get_rank() == 1:
            raise error
        if collective:
            raise StorageError("full")

    try:
        with agreed("saving"):
            go_wrong()
    except BaseException as found:
        return repr(found), "in go_wrong" in traceback.format_exc()
    return "none", False


@pytest.mark.parametrize("others_fail_too", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        KeyError("x"),
        OSError(errno.EIO, "broken"),
        MemoryError("no more"),
        torch.OutOfMemoryError("none left"),
        KeyboardInterrupt("stop"),
        SystemExit(3),
    ],
    ids=repr,
)
def test_an_unforeseen_error_keeps_its_type_and_traceback_and_ends_the_others(error, others_fail_too):
    (other, _), (own, has_traceback) = ranks(2, fails_unforeseen_on_rank_1, error, others_fail_too)
    assert own == repr(error)
    assert has_traceback
    name = type(error).__name__
    assert other.startswith("RankFailedError(")
    assert f"rank 1 failed with {name}: {error}; its traceback is in that rank's output" in other.replace('\\"', '"')


def reads_ahead(failing_step: int) -> tuple[int, str]:
    """A loop whose successful steps have no collective but its own; the step at which it ended, and the error."""
    for step in range(5):
        with attempt() as reading:
            if dist.get_rank() == 1 and step == failing_step:
                raise KeyError(step)
        failed = torch.tensor(int(reading.failed))
        dist.all_reduce(failed)
        try:
            if failed:
                reading.settle("reading")
        except (KeyError, MegalithError) as error:
            return step, type(error).__name__
    return 5, "none"


def test_a_failure_can_travel_in_a_collective_that_is_there_anyway():
    assert ranks(2, reads_ahead, 3) == [(3, "RankFailedError"), (3, "KeyError")]
    assert ranks(2, reads_ahead, 7) == [(5, "none")] * 2


def test_a_process_alone_does_not_speak_of_ranks():
    with pytest.raises(CheckpointError, match=r"^saving: wrong$"), agreed("saving"):
        raise CheckpointError("wrong")
    with pytest.raises(CheckpointError, match=r"^wrong$"), agreed():
        raise CheckpointError("wrong")
    with pytest.raises(KeyError, match="wrong"), agreed("saving"):
        raise KeyError("wrong")


def test_only_errors_of_all_ranks_are_marked_as_such():
    assert everywhere(CheckpointError("x")).on_every_rank
    assert not CheckpointError("x").on_every_rank


def exchange() -> tuple[list[int], list[int], int, int]:
    rank = dist.get_rank()
    return all_gather(rank), gather(rank), scatter([10, 11] if rank == 0 else []), broadcast(os.getpid())


def test_objects_travel():
    (all_0, gathered_0, mine_0, pid_0), (all_1, gathered_1, mine_1, pid_1) = ranks(2, exchange)
    assert all_0 == all_1 == gathered_0 == [0, 1]
    assert gathered_1 == []
    assert (mine_0, mine_1) == (10, 11)
    assert pid_0 == pid_1


def test_a_process_alone_is_rank_0_of_1():
    assert (all_gather(3), gather(3), scatter([3]), broadcast(3)) == ([3], [3], 3, 3)
