"""Saves a checkpoint: all ranks stage it, and one commit publishes it, so that a partial one is never visible.

All files are staged, the manifest last, and the store publishes them (on a file system, by renaming the folder
``.step-X.tmp`` to ``step-X``). Then ``latest`` is replaced, and only after that are old checkpoints removed. The format
is described in docs/checkpoints.md.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megalith.checkpoint.box import Box, local_part
from megalith.checkpoint.folders import LATEST, discard, remove_old, rename_damaged, step_name
from megalith.checkpoint.index import INDEX, index_of, key_of
from megalith.checkpoint.plan import Offer, SavePlan, plan_of, shard_name
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

__all__ = ["BEST", "MOST_STATE_BYTES", "STATE", "StagedCheckpoint", "save_checkpoint", "stage_checkpoint"]

log = logging.getLogger(__name__)

BEST = "best"
STATE = "state.json"
MOST_STATE_BYTES = 16 << 20  # held in memory as a whole, and several times larger once parsed


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
    """Saves the checkpoint of ``step``; returns its location once durable. All ranks of the default group call it.

    An existing step is never overwritten: if it holds the same bytes nothing changes, otherwise it is an error.

    Args:
        folder: RUN/checkpoints, in a store that all ranks share; created if absent.
        tensors: by name; DTensors (Shard and Replicate), or plain tensors, equal on all ranks that have them.
        state: any JSON value up to 16 MiB; rank 0's is stored.
        keep_last: how many of the newest complete checkpoints to keep, at least 1.
        best: a step whose checkpoint is always kept, and which the file ``best`` names; None: the file ``best`` is
            removed. Rank 0's value is used.
        read: returns one of ``tensors`` by name when it is written, so that only one is in memory at a time;
            ``tensors`` must then be whole and may be on meta.

    Raises:
        StorageError: the store of a rank failed or is full.
        CheckpointError: tensors or state that the format cannot hold, or a different checkpoint of this step. Both are
            raised on every rank; earlier checkpoints and ``latest`` are unchanged.
    """
    stage_checkpoint(folder, step, tensors, state, keep_last=keep_last, best=best).publish(read=read)
    return child(folder, step_name(step))


def stage_checkpoint(
    folder: Location,
    step: int,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    *,
    keep_last: int,
    best: int | None = None,
    copied: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None,
) -> "StagedCheckpoint":
    """The first half of ``save_checkpoint``: all ranks agree on who writes what, and the folder is staged.

    ``copied`` is applied to this rank's part of the tensors, by key. If it returns copies, ``tensors`` may change
    before ``publish``. Raises as ``save_checkpoint`` does.
    """
    store, name = open_store(folder), step_name(step)
    task = f"step {step} was not saved and earlier checkpoints are unchanged"
    with agreed(task):
        parts = {name: local_part(name, tensor) for name, tensor in tensors.items()}
    offers_by_rank = gather([_offer(name, tensor, parts[name][0]) for name, tensor in tensors.items()])
    plan, is_there, encoded = SavePlan({}, [], 0), False, b""
    with agreed(task):
        if rank() == 0:
            plan = plan_of(offers_by_rank)
            encoded = _checked(step, state, keep_last)
            is_there = _prepare(store, name, plan.num_bytes)
    try:
        names, is_there = scatter([(names, is_there) for names in plan.names_by_rank])
        with agreed(task):
            mine = {key_of(name, tensors[name].shape, parts[name][0]): parts[name][1] for name in names}
            kept = mine if copied is None else copied(mine)
    except BaseException:
        if rank() == 0:
            discard(store, name)
        raise
    best_name = None if best is None else step_name(best)
    place = rank(), world_size()
    return StagedCheckpoint(store, name, task, *place, plan, is_there, kept, encoded, keep_last, best_name)


@dataclass(frozen=True)
class StagedCheckpoint:
    """A checkpoint whose content is settled, and of which nothing is written yet; ``stage_checkpoint`` returns it.

    Attributes:
        store, name: where it will be.
        task: what has failed if publishing fails, for the error.
        rank, num_ranks: of the default group that staged it, which may be gone when it is published.
        is_there: a complete checkpoint of this step exists, which ``publish`` only compares.
        tensors: what this rank writes, by key.
        state: the content of its state.json; on rank 0.
    """

    store: Store
    name: str
    task: str
    rank: int
    num_ranks: int
    plan: SavePlan
    is_there: bool
    tensors: Mapping[str, Tensor]
    state: bytes
    keep_last: int
    best: str | None

    def publish(self, group: dist.ProcessGroup | None = None, read: Callable[[str], Tensor] | None = None) -> None:
        """Writes and commits it, the second half of ``save_checkpoint``; all ranks call it, once.

        ``group``: a group of all ranks to agree through, None: the default group. With a gloo group of its own it may
        run in a thread, beside other collectives, also once the default group is destroyed.
        """
        try:
            with agreed(self.task, group):
                file = shard_name(self.rank, self.num_ranks)
                records = _write(None if self.is_there else self.store.staged(self.name), file, self.tensors, read)
            records_by_rank = gather(records, group)
            with agreed(self.task, group):
                if self.rank == 0:
                    self._commit({file: record for records in records_by_rank for file, record in records.items()})
                    _point_to_best(self.store, self.best, self.name)
                    remove_old(self.store, self.keep_last, but_not={self.name, self.best or self.name})
        finally:
            if self.rank == 0:
                discard(self.store, self.name)

    def _commit(self, shards: dict[str, FileRecord]) -> None:
        """Adds rank 0's files to ``shards`` and commits; if the step already exists, only compares."""
        if shards.keys() != (planned := self.plan.files()):
            raise CheckpointError(
                f"the ranks must write {', '.join(sorted(planned))}; they have written "
                f"{', '.join(sorted(shards)) or 'nothing'}; all {self.num_ranks} that began this save must complete it"
            )
        small = {INDEX: index_of(self.plan.tensors), STATE: self.state}
        files = shards | {file: record_of([content]) for file, content in small.items()}
        if self.is_there:
            if read_manifest(self.store / self.name) != files:
                raise CheckpointError(
                    f"{self.store / self.name} already exists with different contents; use another folder for this "
                    "run, or move that one"
                )
            return
        staged = self.store.staged(self.name)
        for file, content in small.items():
            staged.put(file, content)
        _check_sizes(staged, files)
        self.store.commit(self.name, manifest_of(files))
        with _warned(self.store / self.name):
            self.store.put(LATEST, f"{self.name}\n".encode())


def _offer(name: str, tensor: Tensor, box: Box) -> Offer:
    return Offer(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), box)


def _checked(step: int, state: Mapping[str, Any], keep_last: int) -> bytes:
    """Returns the content of state.json; raises CheckpointError for invalid arguments."""
    if step < 0 or keep_last < 1:
        raise CheckpointError(
            f"step must be at least 0 and keep_last at least 1; got step={step}, keep_last={keep_last}"
        )
    try:
        encoded = (json.dumps(dict(state), indent=1) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the state must be JSON-serializable: {error}") from error
    if len(encoded) > MOST_STATE_BYTES:
        raise CheckpointError(
            f"the state may have at most {MOST_STATE_BYTES} bytes as JSON; it has {len(encoded)}; save arrays as "
            "tensors"
        )
    return encoded


def _prepare(store: Store, name: str, num_bytes: int) -> bool:
    """Returns whether the step exists and is complete; otherwise stages it. Removes what killed saves left behind."""
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
    staged: Store | None, file: str, tensors: Mapping[str, Tensor], read: Callable[[str], Tensor] | None
) -> dict[str, FileRecord]:
    """Writes this rank's ``file`` and returns its record by name; without ``staged``, only computes the record."""
    if not tensors:
        return {}
    if staged is None:
        return {file: record_of(shard_parts(tensors, read))}
    return {file: write_shard(staged, file, tensors, read)}


def _point_to_best(store: Store, best: str | None, saved: str) -> None:
    """Updates the file ``best``, or removes it without a best step, since its checkpoint may be removed now."""
    with _warned(store / saved):
        if best is None:
            store.remove(BEST)
        else:
            store.put(BEST, f"{best}\n".encode())


@contextmanager
def _warned(saved: Store) -> Iterator[None]:
    """Turns a failure to update a pointer into a warning: the checkpoint ``saved`` is valid, and found without it."""
    try:
        yield
    except StorageError as error:
        log.warning("%s is saved, but %s", saved, error)


def _check_sizes(staged: Store, files: Mapping[str, FileRecord]) -> None:
    """Raises StorageError unless this process sees every file in the size that its rank reported."""
    seen = {file: staged.size(file) for file in staged.names()}
    for file, record in files.items():
        if seen.get(file) != record.bytes:
            raise StorageError(
                f"{record.bytes} bytes were written to {staged / file}, but rank 0 sees {seen.get(file, 'no file')}; "
                "all machines must share the file system of the checkpoints"
            )
