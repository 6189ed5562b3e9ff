"""Saves checkpoints while training continues: the tensors are copied to CPU memory, and a thread writes the copies.

Only the copy keeps training waiting. The ranks agree through a gloo group of their own, which the thread alone uses, so
that a save needs no collective of the training loop. At most one save is being written at a time.
"""

import logging
from collections.abc import Callable, Mapping
from datetime import timedelta
from threading import Thread
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.checkpoint.save import StagedCheckpoint, stage_checkpoint
from megalith.storage import Location, Store
from megalith.topology.agreement import rank, world_size

__all__ = ["BackgroundSaver"]

log = logging.getLogger(__name__)

_QUIET = 2.0  # seconds to wait for the thread without a word
_SLOWEST = timedelta(days=1)  # a rank waits for the slowest writer; gloo notices at once if that one has died


class BackgroundSaver:
    """``save_checkpoint`` that returns once the tensors are copied. All ranks make the same calls, except ``failed``.

    The copies need as much CPU memory as a rank writes, and are kept for the next save.

    Args:
        on_saved: called in the thread, on rank 0, with the step, the checkpoint and the seconds that writing took.
    """

    def __init__(self, on_saved: Callable[[int, Store, float], None]) -> None:
        self._on_saved = on_saved
        self._copies: dict[str, Tensor] = {}
        self._group: dist.ProcessGroup | None = None
        self._thread: Thread | None = None
        self._step = -1
        self._error: BaseException | None = None
        self._told = False  # whether the error was raised

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
        """
        self.wait()
        if self._group is None and world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=_SLOWEST)
        staged = stage_checkpoint(folder, step, tensors, state, keep_last=keep_last, best=best, copied=self._copied)
        self._step = step
        # a daemon: an exit that does not pass through close, such as os._exit in a signal handler, must not wait
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
            self._told = True
            raise self._error

    def close(self) -> None:
        """Waits until nothing is being written; for a run that ends with an error, so it only logs that of a save."""
        self._join()
        if self._error is not None and not self._told:
            log.warning("%s", self._error)

    def _join(self) -> None:
        if self._thread is None:
            return
        self._thread.join(_QUIET)
        if self._thread.is_alive() and rank() == 0:
            log.info("waiting for the checkpoint of step %d, which is being written", self._step)
        self._thread.join()
        self._thread = None

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
            if rank() == 0:
                self._on_saved(self._step, staged.store / staged.name, perf_counter() - started)
        except BaseException as error:  # raised by wait, on the thread of the training loop
            self._error = error
