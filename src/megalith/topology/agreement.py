"""Agreement among ranks: an error on one rank ends all of them and leaves none waiting in a collective.

There are two kinds of error. An expected one, any MegalithError, is raised on every rank with the same class and
message. The message names the ranks that failed, unless all did. Any other exception is unexpected: the rank that hit
it re-raises it with its traceback, and every other rank raises RankFailedError, which names that rank and the
exception. KeyboardInterrupt and SystemExit are treated the same way, because other ranks would wait for a rank that
exits silently.

Collective functions must be called by every rank of the default group, or of the group passed. Without an initialized
process group, this process is the only rank.
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


def rank(group: dist.ProcessGroup | None = None) -> int:
    """Returns this process's rank in ``group``; None: in the default group, or 0 without one."""
    if group is not None:
        return group.rank()  # torch.distributed forgets every group once the default group is destroyed
    return dist.get_rank() if dist.is_initialized() else 0


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """Returns the number of ranks of ``group``; None: of the default group, or 1 without one."""
    if group is not None:
        return group.size()
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def agreed(action: str = "", group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Runs rank-local work without collectives; at the end of the block either all ranks continue or all raise.

    ``group``: a group of all ranks to agree through; None: the default group.

    Raises:
        MegalithError: a rank raised it. Every rank raises that class with the message ``{action}: <ranks>: <reason>``.
            If ranks raised different classes, StorageError takes precedence, because it says nothing about what was
            read; otherwise the first failing rank decides.
        RankFailedError: another rank has an unexpected error; that rank re-raises the error itself.
    """
    with attempt() as work:
        yield
    work.settle(action, group)


@contextmanager
def attempt() -> Iterator["Attempt"]:
    """``agreed`` in two halves: an error in the block is kept in the yielded Attempt until ``settle`` is called.

    For a loop that already has a collective per iteration: send ``failed`` with it, and call ``settle`` only if a rank
    failed, so that an iteration without a failure costs nothing.
    """
    work = Attempt()
    try:
        yield work
    except BaseException as error:  # any exception: the other ranks wait in settle
        work.error = error


class Attempt:
    """The outcome of a block of work on this rank."""

    error: BaseException | None = None

    @property
    def failed(self) -> bool:
        """Whether the block raised on this rank."""
        return self.error is not None

    def settle(self, action: str = "", group: dist.ProcessGroup | None = None) -> None:
        """Collective: returns if no rank failed, otherwise raises on every rank as ``agreed`` does."""
        failures = all_gather(None if self.error is None else _Failure.of(self.error), group)
        if self.error is not None and not isinstance(self.error, MegalithError):
            raise self.error
        for number, failure in enumerate(failures):
            if failure is not None and failure.kind is None:
                text = f"rank {number} failed with {failure.text}; its traceback is in that rank's output"
                raise everywhere(RankFailedError(text)) from self.error
        if verdict := _verdict(failures, action):
            raise verdict from self.error


def everywhere(error: E) -> E:
    """Marks ``error`` as raised on every rank with the same message, so that it is reported once, and returns it."""
    error.on_every_rank = True
    return error


def any_rank(flag: bool, device: torch.device) -> bool:
    """Returns whether ``flag`` is set on any rank, using one small all-reduce on ``device``."""
    if world_size() == 1:
        return flag
    reduced = torch.tensor(int(flag), device=device)
    dist.all_reduce(reduced)
    return bool(reduced)


def all_gather(item: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Returns the ``item`` of every rank of ``group`` (None: the default group) in rank order, on each of them."""
    size = world_size(group)
    if size == 1:
        return [item]
    items: list[Any] = [None] * size
    dist.all_gather_object(items, item, group)
    return items


def gather(item: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Returns the ``item`` of every rank, in rank order, on rank 0, and an empty list on the other ranks.

    ``group``: a group of all ranks to send through; None: the default group.
    """
    size = world_size(group)
    if size == 1:
        return [item]
    items: list[Any] = [None] * size if rank(group) == 0 else []
    dist.gather_object(item, items or None, group_dst=0, group=group)
    return items


def scatter(items: list[T]) -> T:
    """Returns this rank's item of rank 0's ``items``; ``items`` is ignored on other ranks."""
    if world_size() == 1:
        return items[0]
    received: list[Any] = [None]
    dist.scatter_object_list(received, items if rank() == 0 else None, src=0)
    mine: T = received[0]
    return mine


def broadcast(item: T) -> T:
    """Returns rank 0's ``item``."""
    if world_size() == 1:
        return item
    items = [item]
    dist.broadcast_object_list(items, src=0)
    return items[0]


@dataclass(frozen=True)
class _Failure:
    """A rank's error as sent to the others. ``kind`` is its class if it is a MegalithError, otherwise None.

    ``names_ranks``: it was agreed on before, so that its text already says which ranks failed.
    """

    kind: type[MegalithError] | None
    text: str
    names_ranks: bool = False

    @classmethod
    def of(cls, error: BaseException) -> "_Failure":
        # an unexpected error is sent by name: its class may not exist on another rank, or need more than a message
        if isinstance(error, MegalithError):
            return cls(type(error), str(error), error.on_every_rank)
        return cls(None, f"{type(error).__name__}: {error}")


def _verdict(failures: list[_Failure | None], action: str) -> MegalithError | None:
    """Returns the single error that stands for the ``failures`` of all ranks, or None if there are none."""
    kinds = [failure.kind for failure in failures if failure is not None and failure.kind is not None]
    if not kinds:
        return None
    kind = next((kind for kind in kinds if issubclass(kind, StorageError)), kinds[0])
    ranks_by_text: dict[str, set[int]] = {}
    for number, failure in enumerate(failures):
        if failure is not None:
            numbers = range(len(failures)) if failure.names_ranks else [number]
            ranks_by_text.setdefault(failure.text, set()).update(numbers)
    texts = "; ".join(_where(numbers, len(failures)) + text for text, numbers in ranks_by_text.items())
    return everywhere(kind(f"{action}: {texts}" if action else texts))


def _where(numbers: set[int], num_ranks: int) -> str:
    if len(numbers) == num_ranks:
        return ""
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, sorted(numbers))) + ": "
