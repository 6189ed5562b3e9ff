"""Verifies that a checkpoint is what was saved: every listed byte is checked before any of it is interpreted.

Only ``.safetensors`` and ``.json`` files that the manifest lists are ever opened. A manifest that lists any other file,
which could hold a pickle (.pt, .bin, .distcp, .metadata, .pkl), is rejected. Files that it does not list are not part
of the checkpoint, whatever their names: they cause a warning and are never opened. Nothing is unpickled anywhere.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megalith.checkpoint.folders import steps_of
from megalith.errors import CheckpointError, MissingFileError
from megalith.storage import MANIFEST, WAY_OUT, FileRecord, Store, manifest_of, open_store, read_manifest, record_of
from megalith.topology.agreement import agreed, all_gather, everywhere, rank, world_size

__all__ = ["read_verified", "verify_checkpoint"]

log = logging.getLogger(__name__)

_SUFFIXES = {".json", ".safetensors"}
_SHOWN = 8  # number of names in a warning


def verify_checkpoint(location: str | Path | Store) -> None:
    """Reads and hashes every listed file of the checkpoint ``location``, split over the ranks, all of which call it.

    Files and folders that the manifest does not list are ignored, with one warning.

    Raises:
        CheckpointError: the same on every rank; it names each file that is damaged, missing or of a forbidden type.
        StorageError: a rank cannot read a file, which says nothing about the checkpoint.
    """
    store = open_store(location)
    with agreed(f"{store} cannot be verified"):
        found_here = _inspect(store)
    found = all_gather(found_here)
    if problems := {problem for each in found for problem in each.problems} | _disagreement(found):
        raise everywhere(
            CheckpointError(
                f"{store} failed verification and was not loaded:\n  "
                + "\n  ".join(sorted(problems))
                + "\nuse an older checkpoint of the run, or copy this one again from its source"
            )
        )
    if (unlisted := sorted({name for each in found for name in each.unlisted})) and rank() == 0:
        more = f" and {len(unlisted) - _SHOWN} more" if len(unlisted) > _SHOWN else ""
        log.warning(
            "%s has files that are not listed in %s and are ignored: %s%s",
            *(store, MANIFEST, ", ".join(unlisted[:_SHOWN]), more),
        )


def read_verified(store: Store, name: str) -> bytes:
    """Returns the content of the file ``name`` of the checkpoint ``store``, checked against the manifest.

    Raises:
        CheckpointError: the content does not match.
        StorageError: it cannot be read.
    """
    wanted = read_manifest(store).get(name)
    # the size first, so that a file that has grown past the available memory is not read
    if wanted is not None and store.size(name) == wanted.bytes:
        content = store.read(name)
        if wanted == record_of([content]):
            return content
    problem = f"it is not listed in {MANIFEST}" if wanted is None else f"its content does not match {MANIFEST}"
    raise CheckpointError(f"{store / name} is damaged: {problem}; {WAY_OUT}")


@dataclass(frozen=True)
class _Findings:
    """What a rank found in a checkpoint: ``manifest`` is the digest of the manifest's table as read by that rank."""

    manifest: str | None
    problems: list[str]
    unlisted: list[str] = field(default_factory=list)


def _inspect(store: Store) -> _Findings:
    """Returns the problems with the manifest, and with the files assigned to this rank, one line each."""
    try:
        records = read_manifest(store)
    except CheckpointError as error:
        return _Findings(None, [f"{error}{_steps_nearby(store)}"])
    problems = [
        f"{name}: {MANIFEST} may list only .safetensors and .json files; no others are read"
        for name in records
        if Path(name).suffix not in _SUFFIXES
    ]
    # largest first, so that the ranks' shares are even
    by_size = sorted(records, key=lambda name: (-records[name].bytes, name))
    for name in by_size[rank() :: world_size()]:
        if problem := _damage(store, name, records[name]):
            problems.append(problem)
    unlisted = sorted(set(store.names()) - {MANIFEST} - set(records))
    return _Findings(_digest(records), problems, unlisted)


def _disagreement(found: list[_Findings]) -> set[str]:
    """Returns a problem if every rank has read a valid manifest, but not the same one."""
    manifests = {each.manifest for each in found}
    if None in manifests or len(manifests) == 1:
        return set()
    return {f"{MANIFEST}: ranks read different versions; all machines must share the file system of the checkpoints"}


def _digest(records: Mapping[str, FileRecord]) -> str:
    return record_of([manifest_of(records)]).sha256


def _damage(store: Store, name: str, wanted: FileRecord) -> str | None:
    """Returns what is wrong with the file ``name``, in one line; None if it matches ``wanted``."""
    try:
        num_bytes = store.size(name)
        if num_bytes != wanted.bytes:
            return f"{name}: {wanted.bytes} bytes were saved, but the file has {num_bytes}"
        found = record_of(store.parts(name))
    except MissingFileError:
        return f"{name}: the file is missing"
    return None if found == wanted else f"{name}: its SHA-256 does not match {MANIFEST}"


def _steps_nearby(store: Store) -> str:
    """Suggests the path of a checkpoint if ``store`` is the run's folder or its checkpoints folder."""
    try:
        steps = [folder / name for folder in (store, store / "checkpoints") for name in steps_of(folder)]
    except MissingFileError:  # it is a file
        return ""
    return f"; use one of its steps, such as {steps[0]}" if steps else ""
