"""An error on one rank is the same error on all."""

import errno
import os

import pytest
import torch.distributed as dist

from megalith.checkpoint.agreement import agreed, all_gather, broadcast, gather, scatter
from megalith.errors import CheckpointError, StorageError
from tests.rank_pool import ranks


def errors_of(failing: dict[int, Exception]) -> tuple[str, bool]:
    """The error that this rank is left with, and whether it shows the one that was raised here."""
    error = failing.get(dist.get_rank())
    try:
        with agreed("saving"):
            if error is not None:
                raise error
    except (CheckpointError, StorageError) as found:
        return repr(found), found.__cause__ is error
    return "none", True


@pytest.mark.parametrize(
    ("failing", "everywhere"),
    [
        ({}, "none"),
        ({1: CheckpointError("no such tensor")}, "CheckpointError('saving: rank 1: no such tensor')"),
        ({0: StorageError("full"), 1: StorageError("full")}, "StorageError('saving: ranks 0, 1: full')"),
        ({0: KeyError("x"), 1: StorageError("full")}, "StorageError(\"saving: rank 0: KeyError: 'x'; rank 1: full\")"),
        ({1: OSError(errno.EIO, "broken")}, "StorageError('saving: rank 1: OSError: [Errno 5] broken')"),
    ],
)
def test_all_ranks_end_alike(failing, everywhere):
    assert ranks(2, errors_of, failing) == [(everywhere, True)] * 2


def test_a_process_alone_does_not_speak_of_ranks():
    with pytest.raises(CheckpointError, match=r"^saving: wrong$"), agreed("saving"):
        raise CheckpointError("wrong")


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
