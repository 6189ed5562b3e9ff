"""The folder of a run's checkpoints: names of steps, which are complete, which may go.

``step-00000100`` is a published checkpoint, and ``step-00000100.damaged`` one that was set aside. What is being written
or removed the store hides. ``latest`` names the newest, and ``best`` one that is kept for its loss, both for people and
scripts: nothing here reads what they say.
"""

import logging
import math
import re
from collections.abc import Collection, Iterator

from megalith.errors import CheckpointError, StorageError
from megalith.storage import Location, Store, child, has_all_files, open_store, sibling
from megalith.topology.agreement import agreed, broadcast, rank

__all__ = [
    "LATEST",
    "complete_steps",
    "discard",
    "find_checkpoint",
    "remove_old",
    "rename_damaged",
    "set_aside_damaged",
    "step_name",
    "traces_of_saves",
]

log = logging.getLogger(__name__)

LATEST = "latest"
_STEP = re.compile(r"step-(\d{8,})")
_TRACE = re.compile(rf"{_STEP.pattern}(\.damaged.*)?$")


def step_name(step: int) -> str:
    """The folder in which the checkpoint of ``step`` is published."""
    return f"step-{step:08}"


def find_checkpoint(folder: Location, *, but_not: Collection[str] = ()) -> Location | None:
    """The newest complete checkpoint in ``folder``, or None; rank 0 looks, and every rank gets its answer.

    Complete is one with a sound manifest and all its files in their sizes; what is in them ``verify_checkpoint`` tells.
    A newer one that is not complete is passed over with a warning, and so are the names in ``but_not``, without one.

    Raises:
        CheckpointError: a newer one is of a format that this version does not read.
        StorageError: ``folder`` or what is in it cannot be read.
    """
    newest = None
    with agreed(f"looking for a checkpoint in {folder}"):
        if rank() == 0:
            # those above are told already, by the call that found them
            steps = complete_steps(open_store(folder), tell_below=min(map(_number_of, but_not), default=math.inf))
            newest = next((name for name in steps if name not in but_not), None)
    newest = broadcast(newest)
    return None if newest is None else child(folder, newest)


def traces_of_saves(store: Store) -> list[str]:
    """Names in ``store`` that a finished save has left, of checkpoints that may be damaged or set aside since.

    A folder that a killed save has left half written is none of them.
    """
    unfinished = set(store.leftovers())
    return [name for name in store.names() if name == LATEST or (_TRACE.match(name) and name not in unfinished)]


def complete_steps(store: Store, *, tell_below: float = 0) -> Iterator[str]:
    """The names of the complete checkpoints in ``store``, newest first. Raises as ``find_checkpoint``.

    Of steps below ``tell_below``, those that are not complete are warned about.
    """
    for name in sorted(filter(_STEP.fullmatch, store.names()), key=_number_of, reverse=True):
        if has_all_files(store / name):
            yield name
        elif _number_of(name) < tell_below:
            log.warning("%s is not a complete checkpoint: it is passed over", store / name)


def set_aside_damaged(path: Location) -> Location:
    """Renames the checkpoint ``path`` so that ``find_checkpoint`` no longer sees it; its new place, on every rank.

    Raises:
        StorageError: it cannot be renamed.
    """
    aside = ""
    store, name = open_store(path).split()
    with agreed(f"setting {path} aside"):
        if rank() == 0:
            aside = rename_damaged(store, name)
    return sibling(path, broadcast(aside))


def rename_damaged(store: Store, name: str) -> str:
    """``set_aside_damaged`` for one process; the new name of the folder ``name``. Raises StorageError."""
    aside = _free_name(f"{name}.damaged", store.names())
    store.rename(name, aside)
    log.warning("%s is damaged: it is kept as %s and used no more", store / name, aside)
    return aside


def remove_old(store: Store, keep_last: int, but_not: Collection[str]) -> None:
    """Removes complete checkpoints but ``but_not`` and the ``keep_last`` newest; what cannot be removed is logged."""
    try:
        for name in list(complete_steps(store))[keep_last:]:
            if name not in but_not:
                store.remove_folder(name)
    except (StorageError, CheckpointError) as error:
        log.warning("old checkpoints in %s cannot be removed: %s", store, error)


def discard(store: Store, name: str) -> None:
    """Drops what is staged of the folder ``name``; if that fails, it is logged, and left for the next save."""
    try:
        store.abandon(name)
    except StorageError as error:
        log.warning("%s", error)


def _number_of(name: str) -> int:
    return int(name.removeprefix("step-"))


def _free_name(name: str, taken: list[str]) -> str:
    candidate, number = name, 2
    while candidate in taken:
        candidate, number = f"{name}-{number}", number + 1
    return candidate
