"""Whether a checkpoint is what was saved: every byte of it, and nothing besides, before any of it is interpreted.

Only ``.safetensors`` and ``.json`` are ever opened. A file that could hold a pickle (.pt, .bin, .distcp, .metadata,
.pkl) is refused by its name, and so is any other that the manifest does not list; nothing is unpickled anywhere.
"""

import hashlib
from pathlib import Path

from megalith.errors import CheckpointError
from megalith.storage import MANIFEST, FileRecord, explained, read_manifest, record_of
from megalith.topology.agreement import agreed, all_gather, everywhere, rank, world_size

__all__ = ["read_verified", "verify_checkpoint"]

_SUFFIXES = {".json", ".safetensors"}


def verify_checkpoint(path: Path) -> None:
    """Reads and hashes every file of the checkpoint ``path``, split over the ranks, all of which call it.

    Raises:
        CheckpointError: on every rank alike; it names each file that is damaged, missing, foreign or of a refused kind.
        StorageError: the disk of a rank does not let a file be read, which says nothing about the checkpoint.
    """
    with agreed(f"{path} cannot be verified"):
        found_here = _problems(path)
    problems = {problem for found in all_gather(found_here) for problem in found}
    if problems:
        raise everywhere(
            CheckpointError(
                f"{path} is not what was saved, and is not loaded:\n  "
                + "\n  ".join(sorted(problems))
                + "\nuse an older checkpoint of the run, or copy this one again from where it came"
            )
        )


def read_verified(path: Path, name: str) -> bytes:
    """The content of the file ``name`` of the checkpoint ``path``, which is what the manifest lists.

    Raises:
        CheckpointError: it is not.
        StorageError: it cannot be read.
    """
    wanted = read_manifest(path).get(name)
    with explained("read", path / name):
        content = (path / name).read_bytes()
    if wanted != FileRecord(len(content), hashlib.sha256(content).hexdigest()):
        raise CheckpointError(f"{path / name} is damaged: its content is not what {MANIFEST} lists")
    return content


def _problems(path: Path) -> list[str]:
    """What is wrong with the folder, and with the files that fall to this rank, one line each."""
    try:
        records = read_manifest(path)
    except CheckpointError as error:
        return [f"{error}{_steps_nearby(path)}"]
    with explained("read", path):
        present = {entry.name for entry in path.iterdir()} - {MANIFEST}
    problems = []
    for name in sorted(present | set(records)):
        if Path(name).suffix not in _SUFFIXES:
            problems.append(f"{name}: only .safetensors and .json files are read, and no other may lie here")
        elif name not in records:
            problems.append(f"{name}: {MANIFEST} does not list it")
    # the largest first, so that the ranks' shares are even
    by_size = sorted(records, key=lambda name: (-records[name].bytes, name))
    for name in by_size[rank() :: world_size()]:
        if problem := _damage(path / name, records[name]):
            problems.append(problem)
    return problems


def _damage(file: Path, wanted: FileRecord) -> str | None:
    """What is wrong with ``file``, in one line; None if it is as ``wanted``."""
    with explained("read", file):
        try:
            num_bytes = file.stat().st_size
            if num_bytes != wanted.bytes:
                return f"{file.name}: {wanted.bytes} bytes were saved, and it has {num_bytes}"
            return None if record_of(file) == wanted else f"{file.name}: its SHA-256 is not that of what was saved"
        except FileNotFoundError:
            return f"{file.name}: it is missing"


def _steps_nearby(path: Path) -> str:
    """Where a checkpoint is, if ``path`` is the run's folder or that of its checkpoints."""
    steps = sorted([*path.glob("step-*"), *path.glob("checkpoints/step-*")])
    return f"; give one of its steps, as {steps[-1]}" if steps else ""
