"""Whether a checkpoint is what was saved: every byte of it, and nothing besides, before any of it is interpreted.

Only ``.safetensors`` and ``.json`` are ever opened. A file that could hold a pickle (.pt, .bin, .distcp, .metadata,
.pkl) is refused by its name, and so is any other that the manifest does not list; nothing is unpickled anywhere.
"""

from pathlib import Path

from megalith.errors import CheckpointError, MissingFileError
from megalith.storage import MANIFEST, FileRecord, Store, open_store, read_manifest, record_of
from megalith.topology.agreement import agreed, all_gather, everywhere, rank, world_size

__all__ = ["read_verified", "verify_checkpoint"]

_SUFFIXES = {".json", ".safetensors"}


def verify_checkpoint(location: str | Path | Store) -> None:
    """Reads and hashes every file of the checkpoint ``location``, split over the ranks, all of which call it.

    Raises:
        CheckpointError: on every rank alike; it names each file that is damaged, missing, foreign or of a refused kind.
        StorageError: the disk of a rank does not let a file be read, which says nothing about the checkpoint.
    """
    store = open_store(location)
    with agreed(f"{store} cannot be verified"):
        found_here = _problems(store)
    problems = {problem for found in all_gather(found_here) for problem in found}
    if problems:
        raise everywhere(
            CheckpointError(
                f"{store} is not what was saved, and is not loaded:\n  "
                + "\n  ".join(sorted(problems))
                + "\nuse an older checkpoint of the run, or copy this one again from where it came"
            )
        )


def read_verified(store: Store, name: str) -> bytes:
    """The content of the file ``name`` of the checkpoint ``store``, which is what the manifest lists.

    Raises:
        CheckpointError: it is not.
        StorageError: it cannot be read.
    """
    wanted = read_manifest(store).get(name)
    content = store.read(name)
    if wanted != record_of([content]):
        raise CheckpointError(f"{store / name} is damaged: its content is not what {MANIFEST} lists")
    return content


def _problems(store: Store) -> list[str]:
    """What is wrong with the folder, and with the files that fall to this rank, one line each."""
    try:
        records = read_manifest(store)
    except CheckpointError as error:
        return [f"{error}{_steps_nearby(store)}"]
    present = set(store.names()) - {MANIFEST}
    problems = []
    for name in sorted(present | set(records)):
        if Path(name).suffix not in _SUFFIXES:
            problems.append(f"{name}: only .safetensors and .json files are read, and no other may lie here")
        elif name not in records:
            problems.append(f"{name}: {MANIFEST} does not list it")
    # the largest first, so that the ranks' shares are even
    by_size = sorted(records, key=lambda name: (-records[name].bytes, name))
    for name in by_size[rank() :: world_size()]:
        if problem := _damage(store, name, records[name]):
            problems.append(problem)
    return problems


def _damage(store: Store, name: str, wanted: FileRecord) -> str | None:
    """What is wrong with the file ``name``, in one line; None if it is as ``wanted``."""
    try:
        num_bytes = store.size(name)
        if num_bytes != wanted.bytes:
            return f"{name}: {wanted.bytes} bytes were saved, and it has {num_bytes}"
        found = record_of(store.parts(name))
    except MissingFileError:
        return f"{name}: it is missing"
    return None if found == wanted else f"{name}: its SHA-256 is not that of what was saved"


def _steps_nearby(store: Store) -> str:
    """Where a checkpoint is, if ``store`` is the run's folder or that of its checkpoints."""
    try:
        found = [folder / name for folder in (store, store / "checkpoints") for name in folder.names()]
    except MissingFileError:  # it is a file
        return ""
    steps = [path for path in found if path.split()[1].startswith("step-")]
    return f"; give one of its steps, as {steps[-1]}" if steps else ""
