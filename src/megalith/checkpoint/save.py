"""Saves a checkpoint: staged by all ranks, committed once, so that no instant leaves half of one.

All files are written aside, the manifest last, and the store publishes them (on a file system, by renaming the folder
``.step-X.tmp`` to ``step-X``); ``latest`` is replaced; only then may old checkpoints go. The format is described in
docs/checkpoints.md.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from megalith.checkpoint.box import Box, local_part
from megalith.checkpoint.folders import LATEST, discard, remove_old, rename_damaged, step_name
from megalith.checkpoint.index import INDEX, index_of, key_of
from megalith.checkpoint.plan import Offer, SavePlan, plan_of
from megalith.checkpoint.shard_file import shard_parts, write_shard
from megalith.errors import CheckpointError, StorageError
from megalith.storage import (
    FileRecord,
    Location,
    Store,
    child,
    has_all_files,
    manifest_of,
    open_store,
    read_manifest,
    record_of,
)
from megalith.topology.agreement import agreed, gather, rank, scatter, world_size

__all__ = ["BEST", "MOST_STATE_BYTES", "STATE", "save_checkpoint"]

log = logging.getLogger(__name__)

BEST = "best"
STATE = "state.json"
MOST_STATE_BYTES = 16 << 20  # it is held in memory whole, several times as large when it is parsed


def save_checkpoint(
    folder: Location,
    step: int,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    *,
    keep_last: int,
    best: int | None = None,
    read: Callable[[str], Tensor] | None = None,
) -> Location:
    """Where the checkpoint of ``step`` is, complete and durable; all ranks of the default group call it.

    A step that is there already is never overwritten: if it holds the same bytes nothing changes, else it is an error.

    Args:
        folder: RUN/checkpoints, in a store that all ranks share; made if absent.
        tensors: by name; DTensors (Shard and Replicate), or plain tensors, equal on all ranks that have them.
        state: anything JSON, up to 16 MiB of it; rank 0's is stored.
        keep_last: how many of the newest complete checkpoints stay, at least 1.
        best: a step whose checkpoint stays however old it is, and that the file ``best`` names; None: no file ``best``
            stays; rank 0's counts.
        read: gives each of ``tensors``, which are whole and may be on meta, by name when it is written: one is in
            memory at a time.

    Raises:
        StorageError: the store of a rank failed or is full.
        CheckpointError: tensors or state that the format cannot hold, or another checkpoint of this step.
            Both on every rank; earlier checkpoints and ``latest`` are as they were.
    """
    store, name = open_store(folder), step_name(step)
    task = f"step {step} is not saved, earlier checkpoints are as they were"
    with agreed(task):
        parts = {name: local_part(name, tensor) for name, tensor in tensors.items()}
    offers_by_rank = gather([_offer(name, tensor, parts[name][0]) for name, tensor in tensors.items()])
    plan, is_there = SavePlan({}, [], 0), False
    with agreed(task):
        if rank() == 0:
            plan = plan_of(offers_by_rank)
            _check_arguments(step, state, keep_last)
            is_there = _prepare(store, name, plan.num_bytes)
    try:
        names, is_there = scatter([(names, is_there) for names in plan.names_by_rank])
        with agreed(task):
            mine = {key_of(name, tensors[name].shape, parts[name][0]): parts[name][1] for name in names}
            records = _write(None if is_there else store.staged(name), mine, read)
        records_by_rank = gather(records)
        with agreed(task):
            if rank() == 0:
                shards = {file: record for records in records_by_rank for file, record in records.items()}
                _publish(store, name, shards, plan, state, is_there)
                best_name = None if best is None else step_name(best)
                _point_to_best(store, best_name, name)
                remove_old(store, keep_last, but_not={name, best_name or name})
    finally:
        if rank() == 0:
            discard(store, name)
    return child(folder, name)


def _offer(name: str, tensor: Tensor, box: Box) -> Offer:
    return Offer(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), box)


def _check_arguments(step: int, state: Mapping[str, Any], keep_last: int) -> None:
    if step < 0 or keep_last < 1:
        raise CheckpointError(
            f"step must be at least 0 and keep_last at least 1; got step={step}, keep_last={keep_last}"
        )
    try:
        num_bytes = len(_json_of(state))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the state must be JSON: {error}") from error
    if num_bytes > MOST_STATE_BYTES:
        raise CheckpointError(
            f"the state may have {MOST_STATE_BYTES} bytes of JSON at most; it has {num_bytes}; save arrays as tensors"
        )


def _json_of(state: Mapping[str, Any]) -> bytes:
    return (json.dumps(dict(state), indent=1) + "\n").encode()


def _prepare(store: Store, name: str, num_bytes: int) -> bool:
    """Whether the step is there, complete; if not, makes ready to write it. Removes what killed saves have left."""
    for leftover in store.leftovers():
        log.info("removing %s, which a killed process left behind", store / leftover)
        discard(store, leftover)
    if has_all_files(store / name):
        return True
    if name in store.names():
        rename_damaged(store, name)
    store.stage(name, num_bytes)
    return False


def _write(
    staged: Store | None, tensors: Mapping[str, Tensor], read: Callable[[str], Tensor] | None
) -> dict[str, FileRecord]:
    """Writes this rank's file, and returns its record by its name; without ``staged``, only says what it would be."""
    file = f"shard-{rank():05}-of-{world_size():05}.safetensors"
    if not tensors:
        return {}
    if staged is None:
        return {file: record_of(shard_parts(tensors, read))}
    return {file: write_shard(staged, file, tensors, read)}


def _publish(
    store: Store, name: str, shards: dict[str, FileRecord], plan: SavePlan, state: Mapping[str, Any], is_there: bool
) -> None:
    """Adds to the ``shards`` what rank 0 writes, and commits; if the step is there, only compares."""
    small = {INDEX: index_of(plan.tensors), STATE: _json_of(state)}
    files = shards | {file: record_of([content]) for file, content in small.items()}
    if is_there:
        if read_manifest(store / name) != files:
            raise CheckpointError(
                f"{store / name} is complete already and holds something else; give this run another folder, or move "
                "that one"
            )
        return
    staged = store.staged(name)
    for file, content in small.items():
        staged.put(file, content)
    _check_sizes(staged, files)
    store.commit(name, manifest_of(files))
    with _warned(store / name):
        store.put(LATEST, f"{name}\n".encode())


def _point_to_best(store: Store, best: str | None, saved: str) -> None:
    """Lets the file ``best`` name that checkpoint; without one it goes, since what it names may be removed now."""
    with _warned(store / saved):
        if best is None:
            store.remove(BEST)
        else:
            store.put(BEST, f"{best}\n".encode())


@contextmanager
def _warned(saved: Store) -> Iterator[None]:
    """A pointer that cannot be changed is a warning: the checkpoint ``saved`` stands, and is found without it."""
    try:
        yield
    except StorageError as error:
        log.warning("%s is saved, but %s", saved, error)


def _check_sizes(staged: Store, files: Mapping[str, FileRecord]) -> None:
    """Raises StorageError unless this process sees what every rank says it wrote."""
    seen = {file: staged.size(file) for file in staged.names()}
    for file, record in files.items():
        if seen.get(file) != record.bytes:
            raise StorageError(
                f"{record.bytes} bytes were written to {staged / file} and rank 0 sees {seen.get(file, 'no file')}; "
                "all machines must share the file system of the checkpoints"
            )
