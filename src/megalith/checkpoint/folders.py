"""The folder of a run's checkpoints: names of steps, which are complete, which may go.

``step-00000100`` is a published checkpoint, ``.step-00000100.tmp`` one that is being written or removed, and
``step-00000100.damaged`` one that was set aside. ``latest`` names the newest, for people and scripts: nothing here
reads it.
"""

import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from megalith.errors import CheckpointError
from megalith.storage import explained, fsync_folder, has_all_files
from megalith.topology.agreement import agreed, broadcast, rank

__all__ = [
    "complete_steps",
    "find_checkpoint",
    "remove_leftovers",
    "remove_old",
    "rename_damaged",
    "set_aside_damaged",
    "step_folder",
    "temporary_folder",
]

log = logging.getLogger(__name__)

_STEP = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"\.(step-\d{8,}|latest\.[0-9a-f]+)\.tmp")


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` is published."""
    return folder / f"step-{step:08}"


def temporary_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` is written, and where it goes to be removed."""
    return folder / f".step-{step:08}.tmp"


def find_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint in ``folder``, or None; rank 0 looks, and every rank gets its answer.

    Complete is one with a sound manifest and all its files in their sizes; what is in them ``verify_checkpoint`` tells.
    A newer one that is not complete is passed over with a warning.

    Raises:
        CheckpointError: a newer one is of a format that this version does not read.
        StorageError: ``folder`` or what is in it cannot be read.
    """
    newest = None
    with agreed(f"looking for a checkpoint in {folder}"):
        if rank() == 0:
            newest = next((path for _, path in complete_steps(folder)), None)
    return broadcast(newest)


def complete_steps(folder: Path) -> Iterator[tuple[int, Path]]:
    """The complete checkpoints in ``folder``, newest first. Raises as ``find_checkpoint``."""
    for step, path in sorted(_steps(folder), reverse=True):
        if has_all_files(path):
            yield step, path
        else:
            log.warning("%s is not a complete checkpoint: it is passed over", path)


def set_aside_damaged(path: Path) -> Path:
    """Renames the checkpoint ``path`` so that ``find_checkpoint`` no longer sees it; its new path, on every rank.

    Raises:
        StorageError: it cannot be renamed.
    """
    aside = path
    with agreed(f"setting {path} aside"):
        if rank() == 0:
            aside = rename_damaged(path)
    return broadcast(aside)


def rename_damaged(path: Path) -> Path:
    """``set_aside_damaged`` for one process. Raises StorageError."""
    aside = _free_name(path.with_name(f"{path.name}.damaged"))
    with explained("rename", path):
        os.rename(path, aside)
        fsync_folder(path.parent)
    log.warning("%s is damaged: it is kept as %s and used no more", path, aside.name)
    return aside


def remove_old(folder: Path, keep_last: int, but_not: Path) -> None:
    """Removes complete checkpoints but ``but_not`` and the ``keep_last`` newest; what cannot be removed is logged."""
    try:
        for step, path in list(complete_steps(folder))[keep_last:]:
            if path != but_not:
                # renamed first: killed half way, it is a leftover and not half a checkpoint
                doomed = temporary_folder(folder, step)
                os.rename(path, doomed)
                shutil.rmtree(doomed)
    except (OSError, CheckpointError) as error:
        log.warning("old checkpoints in %s cannot be removed: %s", folder, error)


def remove_leftovers(folder: Path) -> None:
    """Removes what saves and removals that were killed left in ``folder``. What cannot be removed is only logged."""
    for path in [path for path in folder.iterdir() if _LEFTOVER.fullmatch(path.name)]:
        log.info("removing %s, which a killed process left behind", path)
        try:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError as error:
            log.warning("%s cannot be removed: %s", path, error)


def _steps(folder: Path) -> Iterator[tuple[int, Path]]:
    if not folder.exists():
        return
    with explained("read", folder):
        for path in folder.iterdir():
            if match := _STEP.fullmatch(path.name):
                yield int(match[1]), path


def _free_name(path: Path) -> Path:
    candidate, number = path, 2
    while candidate.exists():
        candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate
