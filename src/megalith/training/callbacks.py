"""What happens around the steps of a run: metrics, evaluation, checkpoints. Each reads its own settings, once."""

import logging
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megalith.data.samples import SizedSamples
from megalith.observe.metrics import MetricsWriter
from megalith.observe.peak import peak_flops
from megalith.observe.progress import progress_line
from megalith.topology.agreement import agreed, attempt
from megalith.training.evaluation import evaluate
from megalith.training.loop import Callback, FinishedStep, Outcome
from megalith.training.resume import save
from megalith.training.run import Run

__all__ = ["Checkpoints", "HeldOutLoss", "Metrics"]

log = logging.getLogger(__name__)


class Metrics(Callback):
    """Writes a record of every step to metrics.jsonl, and shows a line every ``train.log_every`` steps; rank 0 only.

    ``show`` takes a line that stays, ``show_progress`` one that the next may replace.
    """

    def __init__(self, run: Run, show: Callable[[str], None], show_progress: Callable[[str], None]) -> None:
        self.show = show
        self.show_progress = show_progress
        self.every = run.config.train.log_every
        self.first_step = run.state.step
        self.seconds = 0.0
        self.writer = MetricsWriter(run.folder, resumed_step=run.state.step) if dist.get_rank() == 0 else None
        self.peak_flops = peak_flops(run.device, run.config.precision.dtype)

    def write(self, record: dict[str, Any]) -> None:
        """Adds one record, on rank 0."""
        if self.writer is not None:
            self.writer.write(record)

    def on_step(self, run: Run, finished: FinishedStep) -> None:
        with attempt() as writing:  # of rank 0 alone: the others hear of an error with the next step's totals
            self._write_step(run, finished)
        if writing.failed:
            run.pending = writing

    def _write_step(self, run: Run, finished: FinishedStep) -> None:
        result, state = finished.result, run.state
        self.seconds += finished.seconds
        samples_per_second = result.num_samples / finished.seconds
        tokens_per_second = samples_per_second * run.task.tokens_per_sample
        peak = None if self.peak_flops is None else self.peak_flops * dist.get_world_size()
        record = {
            "step": state.step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "tokens": run.consumed_tokens,
            "tokens_per_second": tokens_per_second,
            "step_seconds": finished.seconds,
            "mfu": None if peak is None else samples_per_second * run.task.flops_per_sample / peak,
            "consumed_samples": state.consumed_samples,
            "layout": run.layout,
            "skipped": result.skipped,
            "time": finished.spans,
        }
        if len(result.terms) > 1:
            record["terms"] = dict(result.terms)
        if run.loss_scale is not None:
            record["loss_scale"] = run.loss_scale.scale
        self.write(record)
        if result.skipped and run.loss_scale is None:
            log.warning("step %d skipped: loss %s, gradient norm %s", state.step, result.loss, result.grad_norm)
        if state.step % self.every == 0 or state.step == run.config.train.steps:
            left = self.seconds / (state.step - self.first_step) * (run.config.train.steps - state.step)
            steps = run.config.train.steps
            line = progress_line(state.step, steps, result.loss, tokens_per_second, left, result.lr, result.grad_norm)
            self.show_progress(line)

    def on_end(self, run: Run, outcome: Outcome) -> None:
        if self.writer is not None:
            self.writer.close()


class HeldOutLoss(Callback):
    """Evaluates on ``data.valid`` every ``train.evaluation.every`` steps, and after the last."""

    def __init__(self, run: Run, metrics: Metrics) -> None:
        self.metrics = metrics
        self.every: int | None = None
        self.max_samples: int | None = None
        self.dataset: SizedSamples[Any] | None = None
        data, evaluation = run.config.data, run.config.train.evaluation
        if evaluation is not None:
            self.every, self.max_samples = evaluation.every, evaluation.samples
        if data.valid is not None:
            self.dataset = run.task.evaluation_dataset(data.valid)

    def on_step(self, run: Run, finished: FinishedStep) -> None:
        last = run.state.step == run.config.train.steps
        if self.dataset is None or not (last or (self.every is not None and run.state.step % self.every == 0)):
            return
        with run.timers("evaluation"):
            evaluation = evaluate(
                run.task,
                run.chunks,
                self.dataset,
                run.config.train.micro_batch_size,
                pg_collection=run.pg_collection,
                device=run.device,
                max_samples=self.max_samples,
            )
        step, loss, num_tokens = run.state.step, evaluation.loss, evaluation.num_tokens
        if not num_tokens:
            self.metrics.show(f"step {step}  held-out loss not measured: no token of data.valid that was read has one")
            return
        record: dict[str, Any] = {"step": step, "valid_loss": loss, "valid_tokens": num_tokens}
        if len(evaluation.means) > 1:
            record["valid"] = dict(evaluation.means)
        with agreed():
            self.metrics.write(record)
        self.metrics.show(f"step {step}  held-out loss {loss:.4f} over {num_tokens:,} tokens")


class Checkpoints(Callback):
    """Saves every ``checkpoint.every`` steps and wherever the run ends, once a step."""

    def __init__(self, run: Run) -> None:
        self.every, self.keep = run.config.checkpoint.every, run.config.checkpoint.keep
        self.saved_step = run.state.step

    def on_step(self, run: Run, finished: FinishedStep) -> None:
        if self.every is not None and run.state.step % self.every == 0:
            self._save(run)

    def on_end(self, run: Run, outcome: Outcome) -> None:
        if run.state.step != self.saved_step:
            self._save(run)

    def _save(self, run: Run) -> None:
        with run.timers("checkpoint"):
            path = save(run, self.keep)
        self.saved_step = run.state.step
        if dist.get_rank() == 0:
            log.info("saved %s", path)
