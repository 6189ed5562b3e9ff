"""What is measured on held-out samples: every sample counts once, in any layout with the same result."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalith.data.samples import SizedSamples
from megalith.errors import DataError
from megalith.parallel.pipeline.executor import execute
from megalith.parallel.pipeline.plan import one_stage_plan
from megalith.parallel.sharding.fsdp import release_gathered_weights
from megalith.topology.agreement import any_rank, attempt, everywhere
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.training.batch import collate_for
from megalith.training.step import weighted_mean
from megalith.training.tasks.task import AnyTask

__all__ = ["Evaluation", "evaluate"]


@dataclass(frozen=True)
class Evaluation:
    """Means over the held-out samples.

    Attributes:
        loss: as in training: the weighted sum of the loss terms' means.
        means, counts: of each loss term and measure, by name.
        num_tokens: the count of the first loss term; if it is 0, the loss means nothing.
    """

    loss: float
    means: Mapping[str, float]
    counts: Mapping[str, int]
    num_tokens: int


@torch.no_grad()
def evaluate(
    task: AnyTask,
    chunks: Sequence[nn.Module],
    dataset: SizedSamples[Any],
    micro_batch_size: int,
    *,
    pg_collection: ProcessGroupCollection,
    device: torch.device,
    max_samples: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """The means over ``max_samples`` samples spread evenly over ``dataset`` (None: all of them).

    ``progress`` is told the samples done, over all ranks, and how many there are, first and after every micro-batch.

    The same samples each time, dealt over the data-parallel ranks; all ranks call it together and get the same answer.
    Nothing of the training is touched: mode, data position and randomness stay as they are.

    Raises:
        DataError: on every rank; the samples cannot be read.
    """
    if not len(dataset):
        raise everywhere(DataError("there is nothing to evaluate on: the held-out dataset has no samples"))
    num_samples = len(dataset) if max_samples is None else min(max_samples, len(dataset))
    B, dp_rank, dp_size = micro_batch_size, pg_collection.rank("dp"), pg_collection.size("dp")
    together = pg_collection.mesh is not None  # a model of one process is its own matter, whatever runs beside it
    # every rank runs the same number of micro-batches, because a sharded forward is a collective; the last of them may
    # hold padding rows that do not count
    num_micro_batches = -(-num_samples // (B * dp_size))
    collate = collate_for(task, pg_collection)
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def forward(model: nn.Module, index: int) -> Tensor:
        first = (index * dp_size + dp_rank) * B
        with attempt() as reading:
            batch = _batch(collate, dataset, range(first, first + B), num_samples)
            counted = task.counts(batch)
        if any_rank(reading.failed, device) if together else reading.failed:
            reading.settle("the held-out data cannot be read")
        inputs = task.inputs(batch, 0, device)
        output = task.forward(model, inputs)
        for name, value in task.sums(output, inputs).items():
            sums[name] = value.double() + sums.get(name, 0.0)  # on the device: nobody waits for it here
        for name, count in counted.items():
            counts[name] = counts.get(name, 0) + count
        progress(min(num_samples, (index + 1) * dp_size * B), num_samples)
        return output

    training = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
    progress(0, num_samples)
    execute(one_stage_plan(num_micro_batches, backward=False), chunks, forward)
    for chunk, was_training in zip(chunks, training, strict=True):
        release_gathered_weights(chunk)
        chunk.train(was_training)
    return _evaluation(task, sums, counts, pg_collection, device)


def _evaluation(
    task: AnyTask,
    sums: Mapping[str, Tensor],
    counts: Mapping[str, int],
    pg_collection: ProcessGroupCollection,
    device: torch.device,
) -> Evaluation:
    """The means that this rank's ``sums`` and ``counts`` make with those of the others."""
    names = list(counts)
    values = [sums[name].item() for name in names] + [float(counts[name]) for name in names]
    totals = _summed(values, pg_collection, device)
    means = {name: totals[i] / max(1.0, totals[len(names) + i]) for i, name in enumerate(names)}
    whole = {name: int(totals[len(names) + i]) for i, name in enumerate(names)}
    return Evaluation(weighted_mean(task.terms, means), means, whole, whole[next(iter(task.terms))])


def _summed(values: Sequence[float], pg_collection: ProcessGroupCollection, device: torch.device) -> list[float]:
    """The sums of ``values`` over the ranks that speak for their tokens."""
    if pg_collection.mesh is None:
        return list(values)
    reduced = torch.tensor(values, dtype=torch.float64, device=device)
    if not pg_collection.speaks_for_tokens:
        reduced.zero_()
    dist.all_reduce(reduced)
    summed: list[float] = reduced.tolist()
    return summed


def _batch(collate: Callable[..., Any], dataset: SizedSamples[Any], numbers: range, num_samples: int) -> Any:
    """The ``numbers`` of ``num_samples`` samples in even steps; past the end the last one, which does not count."""
    rows = [min(number, num_samples - 1) * len(dataset) // num_samples for number in numbers]
    return collate([dataset[row] for row in rows], rows, [number < num_samples for number in numbers])
