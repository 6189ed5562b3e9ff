"""Saves checkpoints while training continues: the tensors are copied to CPU memory, and a thread writes the copies.

Only the copy keeps training waiting. The ranks agree through a gloo group of their own, which the thread alone uses, so
that a save needs no collective of the training loop. At most one save is being written at a time.
"""

import atexit
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.checkpoint.save import StagedCheckpoint, stage_checkpoint
from megalith.errors import ConfigError
from megalith.storage import Location, Store
from megalith.topology.agreement import rank, world_size
from megalith.torch_compat.distributed import new_group, set_timeout

__all__ = ["BackgroundSaver"]

log = logging.getLogger(__name__)

_QUIET = 2.0  # seconds to wait for the thread without a word
_TO_CONNECT = timedelta(minutes=5)
_SLOWEST = timedelta(days=1)  # a rank waits for the slowest writer, at the pace of its disk
_AFTER_AN_ERROR = 1800.0  # seconds to wait in ``close``: a peer that hangs would never let this rank report its error


class BackgroundSaver:
    """``save_checkpoint`` that returns once the tensors are copied. All ranks make the same calls, except ``failed``.

    The copies need as much CPU memory as a rank writes, and are kept for the next save. ``close`` it before the default
    group is destroyed.

    Args:
        on_saved: called in the thread, on rank 0, with the step, the checkpoint and the seconds that writing took. Its
            errors are logged.

    Raises:
        ConfigError: the ranks cannot connect over gloo.
    """

    def __init__(self, on_saved: Callable[[int, Store, float], None]) -> None:
        self._on_saved = on_saved
        self._copies: dict[str, Tensor] = {}
        self._rank, self._num_ranks = rank(), world_size()
        self._group = _group_of_all() if self._num_ranks > 1 else None
        self._thread: Thread | None = None
        self._step = -1
        self._error: BaseException | None = None
        self._was_raised = False
        self._closed = False
        atexit.register(self.close)  # for a script that ends without it

    def save(
        self,
        folder: Location,
        step: int,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
        *,
        keep_last: int,
        best: int | None = None,
    ) -> None:
        """Begins to save ``step``, after waiting for the previous save. Arguments are those of ``save_checkpoint``.

        ``tensors`` may be changed as soon as it returns.

        Raises:
            StorageError, CheckpointError: on every rank; this save could not begin, or the previous one failed.
            RuntimeError: it is closed, or the default group is not the one that it was made for.
        """
        if self._closed:
            raise RuntimeError(f"step {step} cannot be saved: this BackgroundSaver is closed; make another one")
        if world_size() != self._num_ranks:  # without the group, every rank would save as the only one
            raise RuntimeError(
                f"step {step} cannot be saved: this BackgroundSaver was made for {self._num_ranks} ranks, and the "
                f"default group now has {world_size()}; save before it is destroyed, or make another one"
            )
        self.wait()
        staged = stage_checkpoint(folder, step, tensors, state, keep_last=keep_last, best=best, copied=self._copied)
        self._step = step
        # a daemon: at the end of the program, ``close`` waits for it, but not without limit
        self._thread = Thread(target=self._publish, args=(staged,), name=f"checkpoint of step {step}", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether a save has failed; ``wait`` raises its error. Ranks may learn of it at different times."""
        return self._error is not None

    def wait(self) -> None:
        """Returns once nothing is being written. Raises the error of a save that has failed, on every rank."""
        self._join()
        if self._error is not None:
            self._was_raised = True
            raise self._error

    def close(self, because: BaseException | None = None) -> None:
        """Waits until nothing is being written, for at most half an hour; afterwards nothing can be saved.

        An error of a save is logged unless it was raised. ``because``: the error with which the program ends, which is
        logged before a long wait.
        """
        self._closed = True
        atexit.unregister(self.close)
        if not self._join(because, _AFTER_AN_ERROR):
            log.warning("the checkpoint of step %d was not complete after half an hour, and is given up", self._step)
            return
        if self._error is not None and not self._was_raised and str(self._error) != str(because):
            log.warning("%s", self._error)
        if self._group is not None:
            with suppress(ValueError):  # already destroyed with the default group
                dist.destroy_process_group(self._group)
        self._group = None

    def _join(self, because: BaseException | None = None, seconds: float | None = None) -> bool:
        """Returns whether the thread has ended within ``seconds``; without a limit it always has."""
        if self._thread is None:
            return True
        self._thread.join(_QUIET)
        if self._thread.is_alive():
            waiting = f"waiting for the checkpoint of step {self._step}, which is being written"
            if because is not None:  # on any rank: others may have no error, and wait for this one
                log.info("this program has failed (%s: %s) and %s", type(because).__name__, because, waiting)
            elif self._rank == 0:
                log.info("%s", waiting)
        self._thread.join(seconds)
        if self._thread.is_alive():
            return False
        self._thread = None
        return True

    def _copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies ``tensors`` to CPU memory, that of the previous copies where these have the same shape and dtype."""
        kept = {key: self._copies.get(key) for key in tensors}
        self._copies = {}  # frees what is not reused before anything is allocated
        for key, tensor in tensors.items():
            copy = kept.pop(key)
            if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            self._copies[key] = copy.copy_(tensor.detach())
        return dict(self._copies)

    def _publish(self, staged: StagedCheckpoint) -> None:
        started = perf_counter()
        try:
            staged.publish(self._group)
        except BaseException as error:  # raised by wait, on the thread of the training loop
            self._error = error
            return
        if self._rank == 0:
            try:
                self._on_saved(self._step, staged.store / staged.name, perf_counter() - started)
            except Exception:  # the checkpoint is complete, and the other ranks know nothing of this
                log.exception("the checkpoint of step %d is saved, but what should follow has failed", self._step)


def _group_of_all() -> dist.ProcessGroup:
    try:
        group = new_group(range(world_size()), "gloo", _TO_CONNECT, None)
    except RuntimeError as error:
        raise ConfigError(
            f"saving in the background needs connections over gloo between all ranks: {error}; set GLOO_SOCKET_IFNAME "
            "to the network interface that the machines share, or set checkpoint.async_save=false"
        ) from error
    set_timeout(group, _SLOWEST)
    return group
