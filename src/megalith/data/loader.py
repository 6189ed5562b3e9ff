"""Loads the micro-batches of one rank for each optimizer step, and prefetches those of the next in a thread."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from megalith.data.sampler import microbatch_sample_ids
from megalith.data.samples import Samples

__all__ = ["StepLoader"]

Sample = TypeVar("Sample")
Batch = TypeVar("Batch")
_Step = tuple[int, int, int]  # consumed samples, global batch, micro-batch


class StepLoader(Generic[Sample, Batch]):
    """Loads the samples of data-parallel rank ``dp_rank`` of ``dp_size``; ranks with the same dp_rank load the same.

    ``collate`` builds a micro-batch from samples and the row of each in the step's global batch.
    """

    def __init__(
        self,
        dataset: Samples[Sample],
        collate: Callable[[Sequence[Sample], Sequence[int]], Batch],
        dp_rank: int,
        dp_size: int,
    ) -> None:
        self.dataset = dataset
        self.collate = collate
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self._reader = ThreadPoolExecutor(1, "data")  # one thread: datasets cache their last epochs, not thread-safe
        self._ahead: tuple[_Step, Future[list[Batch]]] | None = None

    def batch(self, consumed: int, global_batch: int, micro_batch: int) -> list[Batch]:
        """This rank's micro-batches of the step that begins at sample ``consumed``; re-raises errors of the thread."""
        step = (consumed, global_batch, micro_batch)
        if self._ahead is not None and self._ahead[0] == step:
            return self._ahead[1].result()
        return self._reader.submit(self._read, step).result()

    def prefetch(self, consumed: int, global_batch: int, micro_batch: int) -> None:
        """Begins to read the next step in the background."""
        step = (consumed, global_batch, micro_batch)
        self._ahead = (step, self._reader.submit(self._read, step))

    def _read(self, step: _Step) -> list[Batch]:
        consumed, global_batch, micro_batch = step
        shares = microbatch_sample_ids(consumed, global_batch, micro_batch, self.dp_rank, self.dp_size)
        return [self.collate([self.dataset[i] for i in share], [i - consumed for i in share]) for share in shares]
