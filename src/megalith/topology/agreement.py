"""All ranks leave with one verdict: an error on one of them ends every rank, and never leaves the others waiting.

Two kinds of error. A foreseen one, any MegalithError, is raised on every rank with its own class and one message, which
names the ranks that have it unless all do. Any other exception is unforeseen: the rank that has it raises it as it is,
with its traceback, and every other rank raises RankFailedError, which names the rank and the exception. That includes
KeyboardInterrupt and SystemExit: a rank that is about to leave says so first, or the others would wait for it.

Each function is called by every rank of the default group, unless it is given another; without an initialised group the
process is alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megalith.errors import MegalithError, RankFailedError, StorageError

__all__ = [
    "Attempt",
    "agreed",
    "all_gather",
    "any_rank",
    "attempt",
    "broadcast",
    "everywhere",
    "gather",
    "rank",
    "scatter",
    "world_size",
]

T = TypeVar("T")
E = TypeVar("E", bound=MegalithError)


def rank() -> int:
    """This process's rank in the default group, or 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """The number of ranks of the default group, or 1."""
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def agreed(action: str = "") -> Iterator[None]:
    """Runs rank-local work, without collectives; at the end of the block all ranks continue, or all raise.

    Raises:
        MegalithError: it was raised on a rank. Every rank gets that class and ``{action}:``, which ranks, and why.
            Among several classes a StorageError goes first, because it says nothing against what was read, then the
            first rank's.
        RankFailedError: another rank has an unforeseen error; on that rank, the error itself.
    """
    with attempt() as work:
        yield
    work.settle(action)


@contextmanager
def attempt() -> Iterator["Attempt"]:
    """``agreed`` in two halves: an error in the block is kept in what this gives, until ``settle`` is called.

    For a loop that already has a collective per iteration: send ``failed`` with it, and call ``settle`` only if a rank
    failed, so that an iteration without a failure costs nothing.
    """
    work = Attempt()
    try:
        yield work
    except BaseException as error:  # the other ranks wait in settle, whatever it is
        work.error = error


class Attempt:
    """What became of a block of work on this rank."""

    error: BaseException | None = None

    @property
    def failed(self) -> bool:
        """Whether this rank has an error."""
        return self.error is not None

    def settle(self, action: str = "") -> None:
        """Collective: returns if no rank has failed, else raises on every rank as ``agreed`` does."""
        failures = all_gather(None if self.error is None else _Failure.of(self.error))
        if self.error is not None and not isinstance(self.error, MegalithError):
            raise self.error
        for number, failure in enumerate(failures):
            if failure is not None and failure.kind is None:
                text = f"rank {number} failed with {failure.text}; its traceback is on its own output"
                raise everywhere(RankFailedError(text)) from self.error
        if verdict := _verdict(failures, action):
            raise verdict from self.error


def everywhere(error: E) -> E:
    """``error``, marked as one that every rank raises here with the same message, so that it is reported once."""
    error.on_every_rank = True
    return error


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether ``flag`` is set on any rank: one small all-reduce over ``device``."""
    if world_size() == 1:
        return flag
    reduced = torch.tensor(int(flag), device=device)
    dist.all_reduce(reduced)
    return bool(reduced)


def all_gather(item: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The ``item`` of every rank of ``group`` (None: of all), in their order, on every rank of it."""
    size = world_size() if group is None else group.size()
    if size == 1:
        return [item]
    items: list[Any] = [None] * size
    dist.all_gather_object(items, item, group)
    return items


def gather(item: T) -> list[T]:
    """The ``item`` of every rank, in their order, on rank 0; an empty list elsewhere."""
    if world_size() == 1:
        return [item]
    items: list[Any] = [None] * world_size() if rank() == 0 else []
    dist.gather_object(item, items or None, dst=0)
    return items


def scatter(items: list[T]) -> T:
    """To each rank its item of rank 0's ``items``; those of other ranks do not count."""
    if world_size() == 1:
        return items[0]
    received: list[Any] = [None]
    dist.scatter_object_list(received, items if rank() == 0 else None, src=0)
    mine: T = received[0]
    return mine


def broadcast(item: T) -> T:
    """Rank 0's ``item``."""
    if world_size() == 1:
        return item
    items = [item]
    dist.broadcast_object_list(items, src=0)
    return items[0]


@dataclass(frozen=True)
class _Failure:
    """What a rank tells of its error. ``kind`` is the class of a foreseen one, None for any other."""

    kind: type[MegalithError] | None
    text: str

    @classmethod
    def of(cls, error: BaseException) -> "_Failure":
        # an unforeseen error is told by name: its class may not exist on another rank, nor be made from a message
        if isinstance(error, MegalithError):
            return cls(type(error), str(error))
        return cls(None, f"{type(error).__name__}: {error}")


def _verdict(failures: list[_Failure | None], action: str) -> MegalithError | None:
    """The one error for the foreseen ``failures`` of all ranks, or None if there are none."""
    kinds = [failure.kind for failure in failures if failure is not None and failure.kind is not None]
    if not kinds:
        return None
    kind = next((kind for kind in kinds if issubclass(kind, StorageError)), kinds[0])
    ranks_by_text: dict[str, list[int]] = {}
    for number, failure in enumerate(failures):
        if failure is not None:
            ranks_by_text.setdefault(failure.text, []).append(number)
    texts = "; ".join(_where(numbers, len(failures)) + text for text, numbers in ranks_by_text.items())
    return everywhere(kind(f"{action}: {texts}" if action else texts))


def _where(numbers: list[int], num_ranks: int) -> str:
    if len(numbers) == num_ranks:
        return ""
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers)) + ": "
