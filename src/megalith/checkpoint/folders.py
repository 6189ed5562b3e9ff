"""The folder of a run's checkpoints: step names, which checkpoints are complete, and which may be removed.

``step-00000100`` is a published checkpoint, and ``step-00000100.damaged`` one that was set aside. The store hides
folders that are being written or removed. ``latest`` names the newest checkpoint and ``best`` the one kept for its
loss; both are for people and scripts, and nothing here reads them.
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
    "steps_of",
    "traces_of_saves",
]

log = logging.getLogger(__name__)

LATEST = "latest"
_STEP = re.compile(r"step-(\d{8,})")
_TRACE = re.compile(rf"{_STEP.pattern}(\.damaged.*)?$")


def step_name(step: int) -> str:
    """Returns the name of the folder in which the checkpoint of ``step`` is published."""
    return f"step-{step:08}"


def find_checkpoint(folder: Location, *, but_not: Collection[str] = (), warn: bool = True) -> Location | None:
    """Returns the newest complete checkpoint in ``folder``, or None; rank 0 searches, and every rank gets the result.

    A checkpoint is complete if its manifest is valid and all its files have the listed sizes; ``verify_checkpoint``
    checks their contents. Newer incomplete ones are skipped with a warning, unless ``warn`` is off, and the names in
    ``but_not`` without one.

    Raises:
        CheckpointError: a newer checkpoint has a format that this version does not read.
        StorageError: ``folder`` or its contents cannot be read.
    """
    newest = None
    with agreed(f"looking for a checkpoint in {folder}"):
        if rank() == 0:
            # the call that found those in but_not has already warned about newer ones
            tell_below = min(map(_number_of, but_not), default=math.inf) if warn else 0
            steps = complete_steps(open_store(folder), tell_below=tell_below)
            newest = next((name for name in steps if name not in but_not), None)
    newest = broadcast(newest)
    return None if newest is None else child(folder, newest)


def traces_of_saves(store: Store) -> list[str]:
    """Returns the names in ``store`` left by finished saves, including checkpoints since damaged or set aside.

    Folders that a killed save left half written are excluded.
    """
    unfinished = set(store.leftovers())
    return [name for name in store.names() if name == LATEST or (_TRACE.match(name) and name not in unfinished)]


def steps_of(store: Store) -> list[str]:
    """Returns the names of the published checkpoints in ``store``, complete or not, newest first."""
    return sorted(filter(_STEP.fullmatch, store.names()), key=_number_of, reverse=True)


def complete_steps(store: Store, *, tell_below: float = 0) -> Iterator[str]:
    """Yields the names of the complete checkpoints in ``store``, newest first. Raises as ``find_checkpoint``.

    Warns about incomplete ones among the steps below ``tell_below``.
    """
    for name in steps_of(store):
        if has_all_files(store / name):
            yield name
        elif _number_of(name) < tell_below:
            log.warning("skipping %s: it is not a complete checkpoint", store / name)


def set_aside_damaged(path: Location) -> Location:
    """Renames the checkpoint ``path`` so that ``find_checkpoint`` skips it; returns the new location, on every rank.

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
    """``set_aside_damaged`` for one process; returns the new name of the folder ``name``. Raises StorageError."""
    aside = _free_name(f"{name}.damaged", store.names())
    store.rename(name, aside)
    log.warning("%s is damaged: it was renamed to %s and will not be used", store / name, aside)
    return aside


def remove_old(store: Store, keep_last: int, but_not: Collection[str]) -> None:
    """Removes complete checkpoints except ``but_not`` and the ``keep_last`` newest; logs a failure to remove one."""
    try:
        for name in list(complete_steps(store))[keep_last:]:
            if name not in but_not:
                store.remove_folder(name)
    except (StorageError, CheckpointError) as error:
        log.warning("failed to remove old checkpoints in %s: %s", store, error)


def discard(store: Store, name: str) -> None:
    """Removes what is staged of the folder ``name``; a failure is logged and left to the next save."""
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
