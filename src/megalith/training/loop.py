"""The training loop: reads batches, runs steps, and calls callbacks around them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from megalith.observe.metrics import COMPILE
from megalith.resilience.rank_link import tell
from megalith.resilience.stop_request import StopRequest
from megalith.topology.agreement import attempt
from megalith.training.run import Run
from megalith.training.step import StepResult, local_counts, sum_totals, train_step

__all__ = ["Callback", "FinishedStep", "Outcome", "train"]


class Outcome(Enum):
    """How a run ended: all steps done, now or by an earlier start, or stopped on request with its state saved."""

    DONE = "done"
    WAS_DONE = "was done"
    STOPPED = "stopped"


@dataclass(frozen=True)
class FinishedStep:
    """The result of a step, its duration including waits for data and the compiler, and how that time was spent."""

    result: StepResult
    seconds: float
    spans: dict[str, float]

    @property
    def work_seconds(self) -> float:
        """``seconds`` without the time spent waiting for a compiler, which later steps do not repeat."""
        return self.seconds - self.spans.get(COMPILE, 0.0)


class Callback:
    """Hooks that run around steps. Every rank calls every callback, so a callback may use collectives."""

    def on_step(self, run: Run, finished: FinishedStep) -> None:
        """Called after each step; ``run.state`` already counts that step."""

    def on_end(self, run: Run, outcome: Outcome) -> None:
        """Called once, after the last step or when the run stops on request."""


def train(run: Run, callbacks: Sequence[Callback], stop: StopRequest) -> Outcome:
    """Trains until ``train.steps``, or until any rank is asked to stop.

    Raises:
        DataError: on every rank, if any rank could not read its batch.
        NonFiniteError: see ``train_step``.
    """
    outcome = Outcome.DONE
    while run.state.step < run.config.train.steps:
        started, before = time.perf_counter(), run.timers.totals()
        consumed = run.state.consumed_samples
        micro_batches: list[Any] = []
        counts: dict[str, int] = {}
        with run.timers("data"), attempt() as reading:
            micro_batches = run.loader.batch(consumed, *_sizes(run, consumed))
            counts = local_counts(run, micro_batches)
        trouble = run.pending if run.pending.failed else reading
        lost: Exception | None = None
        try:
            totals = sum_totals(run, counts, stop.reason is not None, trouble.failed)
        except Exception as error:  # another rank has ended, perhaps because of what happened here
            lost = error
        if lost is not None:  # not in the handler, where raising would replace the error's own context
            raise trouble.error or lost
        if totals.failed:
            trouble.settle()
        if totals.stop:
            outcome = Outcome.STOPPED
            break
        next_one = consumed + run.microbatches.global_batch_size(consumed)
        run.loader.prefetch(next_one, *_sizes(run, next_one))
        result = train_step(run, micro_batches, totals.counts)
        spans = {name: seconds - before.get(name, 0.0) for name, seconds in run.timers.totals().items()}
        spans = {name: seconds for name, seconds in spans.items() if seconds > 0.0}
        finished = FinishedStep(result, time.perf_counter() - started, spans)
        for callback in callbacks:
            callback.on_step(run, finished)
        tell(step=run.state.step)
    run.pending.settle()
    for callback in callbacks:
        callback.on_end(run, outcome)
    run.pending.settle()
    return outcome


def _sizes(run: Run, consumed: int) -> tuple[int, int]:
    return run.microbatches.global_batch_size(consumed), run.config.train.micro_batch_size
