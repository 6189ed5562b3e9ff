"""All ranks leave with one verdict: an error on one of them is an error on each, and never a hang.

Each function is called by every rank of the default group; without an initialised group the process is alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from megalith.errors import CheckpointError, StorageError

__all__ = ["agreed", "all_gather", "broadcast", "gather", "rank", "scatter", "world_size"]

T = TypeVar("T")


def rank() -> int:
    """This process's rank in the default group, or 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """The number of ranks of the default group, or 1."""
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def agreed(task: str) -> Iterator[None]:
    """Work of this rank alone, no collective inside; it ends on all ranks, or raises on all.

    Raises:
        StorageError: the file system failed on a rank.
        CheckpointError: anything else failed on a rank. Both read ``{task}:``, then which rank and why.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # whatever it is, the other ranks wait below
        failure = error
    verdicts = all_gather(None if failure is None else (_text(failure), isinstance(failure, OSError)))
    found = [verdict for verdict in verdicts if verdict is not None]
    if not found:
        return
    kind = StorageError if any(is_os_error for _, is_os_error in found) else CheckpointError
    texts = dict.fromkeys(text for text, _ in found)  # each once: ranks often fail alike
    raise kind(f"{task}: " + "; ".join(_where(text, verdicts) + text for text in texts)) from failure


def all_gather(item: T) -> list[T]:
    """The ``item`` of every rank, in their order, on every rank."""
    if world_size() == 1:
        return [item]
    items: list[Any] = [None] * world_size()
    dist.all_gather_object(items, item)
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


def _text(error: Exception) -> str:
    # our own messages read by themselves; another's needs its kind (KeyError: 'x')
    return str(error) if isinstance(error, (CheckpointError, StorageError)) else f"{type(error).__name__}: {error}"


def _where(text: str, verdicts: list[tuple[str, bool] | None]) -> str:
    if len(verdicts) == 1:
        return ""
    failed = [str(rank) for rank, verdict in enumerate(verdicts) if verdict is not None and verdict[0] == text]
    return ("rank " if len(failed) == 1 else "ranks ") + ", ".join(failed) + ": "
