"""Evaluates on held-out samples: every sample counts once, and the result is the same in any layout."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalith.data.samples import SizedSamples
from megalith.errors import DataError
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.pipeline.pipeline import Pipeline
from megalith.topology.agreement import any_rank, attempt, everywhere
from megalith.topology.process_groups_config import ProcessGroupCollection
from megalith.training.batch import collate_for, inputs_for
from megalith.training.tasks.task import AnyTask, JointTask

__all__ = ["Evaluation", "evaluate"]

_AT_ONCE = 4  # micro-batches per pipeline rank, so that most ranks are busy most of the time


@dataclass(frozen=True)
class Evaluation:
    """Means over the held-out samples.

    Attributes:
        loss: the mean of the first loss term, which the run trains for.
        means, counts: of each loss term and measure, by name. A measure with a count of 0 has no mean: a class without
            samples has no row in the confusion matrix.
        num_tokens: the count of the first loss term; if it is 0, the loss is meaningless.
        counted: what ``num_tokens`` counts, in the plural.
        classes: the names of the classes that measures refer to by number; empty if there are no classes.
    """

    loss: float
    means: Mapping[str, float]
    counts: Mapping[str, int]
    num_tokens: int
    counted: str
    classes: tuple[str, ...] = ()


@torch.no_grad()
def evaluate(
    task: AnyTask,
    pipeline: Pipeline[Any],
    dataset: SizedSamples[Any],
    micro_batch_size: int,
    *,
    options: BuildOptions,
    device: torch.device,
    max_samples: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Computes means over ``max_samples`` samples spread evenly over ``dataset`` (None: all of them).

    ``progress`` is called with the number of samples done, over all ranks, and the total: at the start, and after every
    few micro-batches. ``options`` are those that the model was built with.

    The samples are the same each time and are distributed over the data-parallel ranks. All ranks call this together
    and get the same result. Training state is not affected: mode, data position and randomness stay as they are.

    Raises:
        DataError: on every rank, if the samples cannot be read.
    """
    if not len(dataset):
        raise everywhere(DataError("nothing to evaluate: the held-out dataset has no samples"))
    groups = options.pg_collection
    num_samples = len(dataset) if max_samples is None else min(max_samples, len(dataset))
    B, dp_rank, dp_size = micro_batch_size, groups.rank("dp"), groups.size("dp")
    # every rank runs the same number of micro-batches, because a sharded forward is a collective; the last ones may
    # hold padding rows that do not count
    num_micro_batches = -(-num_samples // (B * dp_size))
    collate = collate_for(task, groups)
    found = _Sums(task, pipeline, device)
    progress(0, num_samples)
    with pipeline.evaluating():
        # ranks check that all could read their batches before they wait for each other in the model; a few at a time,
        # because a GPU is waited for at each check. A model on a single process needs none, even if other ranks exist
        at_once = 1 if groups.mesh is None else _AT_ONCE * pipeline.placement.num_ranks
        for first in range(0, num_micro_batches, at_once):
            numbers = range(first, min(first + at_once, num_micro_batches))
            starts = [(number * dp_size + dp_rank) * B for number in numbers]
            with attempt() as reading:
                batches = [_batch(collate, dataset, range(start, start + B), num_samples) for start in starts]
            if any_rank(reading.failed, device) if groups.mesh is not None else reading.failed:
                reading.settle("the held-out data cannot be read")
            found.add(batches, options)
            progress(min(num_samples, numbers.stop * dp_size * B), num_samples)
        found.finish(options)
    evaluation = _evaluation(task, found.sums, found.counts, groups, device)
    return replace(evaluation, classes=tuple(task.class_names(dataset)))


class _Sums:
    """The sums and counts of this rank; only the last stage has sums."""

    def __init__(self, task: AnyTask, pipeline: Pipeline[Any], device: torch.device) -> None:
        self.task, self.pipeline, self.device = task, pipeline, device
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}
        self._outputs = list[Tensor]()  # kept until the end by a task that compares all samples
        self._compared = list[Any]()

    def add(self, batches: Sequence[Any], options: BuildOptions) -> None:
        """Runs the micro-batches through the model."""
        task = self.task
        inputs_of = inputs_for(task, batches, 0, self.device, self.pipeline.chunks[-1])

        def forward(model: nn.Module, index: int, hidden: Tensor | None) -> Tensor:
            inputs = inputs_of(model, index)
            output: Tensor = task.forward(model, inputs, hidden)
            if not self.pipeline.holds_output(model):
                return output
            if isinstance(task, JointTask):
                self._outputs.append(output)
                self._compared.append(task.compared(inputs))
            else:
                for name, value in task.sums(output, inputs).items():
                    # stays on the device, to avoid a synchronization
                    self.sums[name] = value.double() + self.sums.get(name, 0.0)
            return output

        for batch in batches:
            for name, count in task.counts(batch).items():
                self.counts[name] = self.counts.get(name, 0) + count
        self.pipeline.evaluate(len(batches), forward, lambda index: task.hidden_shape(batches[index], options))

    def finish(self, options: BuildOptions) -> None:
        """Compares the samples with each other, if the task does so. Collective over the ranks of a stage."""
        if isinstance(self.task, JointTask) and self._outputs:
            found = self.task.joint_sums(self._outputs, self._compared, options.pg_collection)
            self.sums = {name: value.double() for name, value in found.items()}


def _evaluation(
    task: AnyTask,
    sums: Mapping[str, Tensor],
    counts: Mapping[str, int],
    pg_collection: ProcessGroupCollection,
    device: torch.device,
) -> Evaluation:
    """Reduces this rank's ``sums`` and ``counts`` over all ranks and returns the means."""
    names = list(counts)
    counted = torch.tensor([counts[name] for name in names], dtype=torch.float64, device=device)
    summed = torch.stack([sums[name] for name in names]) if sums else torch.zeros_like(counted)
    totals = _summed(torch.cat((summed, counted)), pg_collection)
    whole = {name: int(totals[len(names) + i]) for i, name in enumerate(names)}
    means = {
        name: total / max(1, whole[name])
        for name, total in zip(names, totals, strict=False)
        if whole[name] or name in task.terms
    }
    first = next(iter(task.terms))
    return Evaluation(means[first], means, whole, whole[first], task.counted)


def _summed(values: Tensor, pg_collection: ProcessGroupCollection) -> list[float]:
    """Sums ``values`` over the ranks that speak for their tokens."""
    if pg_collection.mesh is not None:
        if not pg_collection.speaks_for_tokens:
            values.zero_()
        dist.all_reduce(values)
    summed: list[float] = values.tolist()
    return summed


def _batch(collate: Callable[..., Any], dataset: SizedSamples[Any], numbers: range, num_samples: int) -> Any:
    """Collates samples ``numbers`` out of ``num_samples`` evenly spaced ones; those past the end are padding.

    Padding repeats the last sample and does not count.
    """
    rows = [min(number, num_samples - 1) * len(dataset) // num_samples for number in numbers]
    return collate([dataset[row] for row in rows], rows, [number < num_samples for number in numbers])
