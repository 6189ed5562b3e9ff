"""The micro-batches of one rank for one optimizer step, with the next step's read ahead in a thread."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megalith.data.gpt_dataset import GPTDataset, GPTSample
from megalith.data.sampler import microbatch_sample_ids

__all__ = ["MicroBatch", "StepLoader", "stack"]

_Step = tuple[int, int, int]  # consumed samples, global batch, micro-batch


@dataclass(frozen=True)
class MicroBatch:
    """B samples: tokens and labels int64 [B, S], loss_mask bool [B, S], documents int32 [B, S].

    row_ids: int64 [B], where each row stands in the step's global batch.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    documents: NDArray[np.int32]
    row_ids: NDArray[np.int64]


def stack(samples: Sequence[GPTSample], row_ids: Sequence[int]) -> MicroBatch:
    """The micro-batch of these samples, one a row."""
    return MicroBatch(
        np.stack([sample.tokens for sample in samples]),
        np.stack([sample.labels for sample in samples]),
        np.stack([sample.loss_mask for sample in samples]),
        np.stack([sample.documents for sample in samples]),
        np.array(row_ids, dtype=np.int64),
    )


class StepLoader:
    """Reads what rank ``dp_rank`` of ``dp_size`` needs for a step; ranks that share a dp_rank read the same."""

    def __init__(self, dataset: GPTDataset, dp_rank: int, dp_size: int) -> None:
        self.dataset = dataset
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self._reader = ThreadPoolExecutor(1, "data")  # one thread: a dataset keeps the order of its last epochs
        self._ahead: tuple[_Step, Future[list[MicroBatch]]] | None = None

    def batch(self, consumed: int, global_batch: int, micro_batch: int) -> list[MicroBatch]:
        """This rank's micro-batches of the step that begins at sample ``consumed``; raises what the thread raised."""
        step = (consumed, global_batch, micro_batch)
        if self._ahead is not None and self._ahead[0] == step:
            return self._ahead[1].result()
        return self._reader.submit(self._read, step).result()

    def prefetch(self, consumed: int, global_batch: int, micro_batch: int) -> None:
        """Begins to read a step that will be asked for next."""
        step = (consumed, global_batch, micro_batch)
        self._ahead = (step, self._reader.submit(self._read, step))

    def _read(self, step: _Step) -> list[MicroBatch]:
        consumed, global_batch, micro_batch = step
        shares = microbatch_sample_ids(consumed, global_batch, micro_batch, self.dp_rank, self.dp_size)
        return [stack([self.dataset[i] for i in share], [i - consumed for i in share]) for share in shares]
