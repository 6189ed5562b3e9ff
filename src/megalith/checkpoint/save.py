"""Saves a checkpoint: written aside by all ranks, published by one rename, so that no instant leaves half of one.

All files are written and fsynced in ``.step-X.tmp/``, the manifest last; the folder is renamed to ``step-X/``;
``latest`` is replaced; only then may old checkpoints go. The format is described in docs/checkpoints.md.
"""

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megalith.checkpoint.box import Box, local_part
from megalith.checkpoint.folders import (
    remove_leftovers,
    remove_old,
    rename_damaged,
    step_folder,
    temporary_folder,
)
from megalith.checkpoint.index import INDEX, StoredTensor, key_of, write_index
from megalith.checkpoint.plan import Offer, Plan, plan_of
from megalith.checkpoint.shard_file import write_shard
from megalith.errors import CheckpointError, StorageError
from megalith.storage import (
    FileRecord,
    explained,
    fsync_folder,
    has_all_files,
    publish_folder,
    read_manifest,
    record_of,
    require_free_bytes,
    write_json_atomic,
    write_manifest,
    write_text_atomic,
)
from megalith.topology.agreement import agreed, gather, rank, scatter, world_size

__all__ = ["LATEST", "STATE", "save_checkpoint"]

log = logging.getLogger(__name__)

LATEST = "latest"
STATE = "state.json"


def save_checkpoint(
    folder: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, keep_last: int
) -> Path:
    """The path of the checkpoint of ``step``, complete and durable; all ranks of the default group call it.

    A step that is there already is never overwritten: if it holds the same bytes nothing changes, else it is an error.

    Args:
        folder: RUN/checkpoints, on a file system that all ranks share; made if absent.
        tensors: by name; DTensors (Shard and Replicate), or plain tensors, equal on all ranks that have them.
        state: anything JSON; rank 0's is stored.
        keep_last: how many of the newest complete checkpoints stay, at least 1.

    Raises:
        StorageError: the disk of a rank failed or is full.
        CheckpointError: tensors or state that the format cannot hold, or another checkpoint of this step.
            Both on every rank; earlier checkpoints and ``latest`` are as they were.
    """
    temporary = temporary_folder(folder, step)
    task = f"step {step} is not saved, earlier checkpoints are as they were"
    with agreed(task):
        parts = {name: local_part(name, tensor) for name, tensor in tensors.items()}
    offers_by_rank = gather([_offer(name, tensor, parts[name][0]) for name, tensor in tensors.items()])
    plan = Plan({}, [], 0)
    with agreed(task):
        if rank() == 0:
            plan = plan_of(offers_by_rank)
            _check_arguments(step, state, keep_last)
            _prepare(folder, temporary, plan.num_bytes)
    try:
        names = scatter(plan.names_by_rank)
        file = f"shard-{rank():05}-of-{world_size():05}.safetensors"
        written: dict[str, FileRecord] = {}
        with agreed(task):
            if names:
                mine = {key_of(name, tensors[name].shape, parts[name][0]): parts[name][1] for name in names}
                written[file] = write_shard(temporary / file, mine)
        records = gather(written)
        with agreed(task):
            if rank() == 0:
                shards = {name: record for shard in records for name, record in shard.items()}
                _publish(temporary, step_folder(folder, step), shards, plan.tensors, state)
                remove_old(folder, keep_last, but_not=step_folder(folder, step))
    finally:
        if rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
    return step_folder(folder, step)


def _offer(name: str, tensor: Tensor, box: Box) -> Offer:
    return Offer(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), box)


def _check_arguments(step: int, state: Mapping[str, Any], keep_last: int) -> None:
    if step < 0 or keep_last < 1:
        raise CheckpointError(
            f"step must be at least 0 and keep_last at least 1; got step={step}, keep_last={keep_last}"
        )
    try:
        json.dumps(dict(state))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the state must be JSON: {error}") from error


def _prepare(folder: Path, temporary: Path, num_bytes: int) -> None:
    """Makes an empty ``temporary``, and room for nothing less than what comes."""
    with explained("write", temporary):
        folder.mkdir(parents=True, exist_ok=True)
        fsync_folder(folder.parent)
        remove_leftovers(folder)
        require_free_bytes(folder, num_bytes)
        temporary.mkdir()


def _publish(
    temporary: Path,
    final: Path,
    shards: dict[str, FileRecord],
    tensors: Mapping[str, StoredTensor],
    state: Mapping[str, Any],
) -> None:
    """Finishes ``temporary``, which holds ``shards``, and makes it ``final``."""
    write_index(temporary, tensors)
    write_json_atomic(temporary / STATE, dict(state))
    files = shards | {name: record_of(temporary / name) for name in (INDEX, STATE)}
    _check_sizes(temporary, files)
    write_manifest(temporary, files)
    if has_all_files(final):
        if read_manifest(final) != files:
            raise CheckpointError(
                f"{final} is complete already and holds something else; give this run another folder, or move that one"
            )
        return
    if final.exists():
        rename_damaged(final)
    publish_folder(temporary, final)
    try:
        write_text_atomic(final.parent / LATEST, final.name + "\n")
    except StorageError as error:  # the checkpoint stands, and is found without it
        log.warning("%s is saved, but %s", final, error)


def _check_sizes(temporary: Path, files: Mapping[str, FileRecord]) -> None:
    """Raises StorageError unless this process sees what every rank says it wrote."""
    with explained("read", temporary):
        seen = {path.name: path.stat().st_size for path in temporary.iterdir()}
    for name, record in files.items():
        if seen.get(name) != record.bytes:
            raise StorageError(
                f"{record.bytes} bytes were written to {temporary / name} and rank 0 sees {seen.get(name, 'no file')}; "
                "all machines must share the file system of the checkpoints"
            )
