"""Callbacks around the steps of a run: metrics, evaluation, checkpoints. Each reads its own settings once."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from time import perf_counter
from typing import Any

import torch.distributed as dist

from megalith.checkpoint.background import BackgroundSaver
from megalith.checkpoint.folders import complete_steps, step_name
from megalith.config import valid_setting
from megalith.data.blended_dataset import BlendedDataset
from megalith.data.samples import SizedSamples
from megalith.observe.memory import peak_memory
from megalith.observe.metrics import COMPILE, MetricsWriter, held_out_loss, read_metrics
from megalith.observe.peak import peak_flops
from megalith.observe.progress import progress_line
from megalith.observe.time_left import TimeLeft
from megalith.observe.trackers import Trackers
from megalith.observe.units import perplexity
from megalith.topology.agreement import agreed, attempt
from megalith.training.energy_of_steps import EnergyOfSteps
from megalith.training.evaluation import Evaluation, evaluate
from megalith.training.expert_loads import experts_record
from megalith.training.loop import Callback, FinishedStep, Outcome
from megalith.training.memory import memory_so_far
from megalith.training.resume import save
from megalith.training.run import Run

__all__ = ["Checkpoints", "HeldOutLoss", "Metrics", "TextSamples"]

log = logging.getLogger(__name__)

_SHOWN_LINES = 8  # lines of a sample on the screen; metrics.jsonl has the whole sample


class Metrics(Callback):
    """Writes a record of every step to metrics.jsonl and to the dashboards of ``tracking``, on rank 0.

    Every rank calls its hooks, because ``energy`` is summed over all of them. Shows a line after the first step of this
    start, and every ``train.log_every`` steps. ``show`` takes a line that stays, ``show_progress`` one that the next
    may replace.
    """

    def __init__(
        self,
        run: Run,
        show: Callable[[str], None],
        show_progress: Callable[[str], None],
        trackers: Trackers,
        energy: EnergyOfSteps | None = None,
    ) -> None:
        self.trackers = trackers
        self.show = show
        self.show_progress = show_progress
        self.every = run.config.train.log_every
        self.first_step = run.state.step + 1
        self.left = TimeLeft(run.config.train.steps)
        self.between: dict[str, float] = {}
        self.held_out = (-1, math.nan)  # the last evaluation: its step and loss
        self.writer = MetricsWriter(run.folder, resumed_step=run.state.step) if dist.get_rank() == 0 else None
        self.peak_flops = peak_flops(run.device, run.config.precision.dtype)
        self.energy = energy

    def write(self, record: dict[str, Any]) -> None:
        """Writes one record, on rank 0."""
        if self.writer is not None:
            self.writer.write(record)
            self.trackers.write(record)

    @contextmanager
    def timed(self, run: Run, name: str, every: int | None) -> Iterator[dict[str, float]]:
        """Times work that recurs every ``every`` steps; the yielded dict has {span: seconds} once the block ends."""
        started, before = perf_counter(), run.timers.totals().get(COMPILE, 0.0)
        spans: dict[str, float] = {}
        with self._energy_paused(), run.timers(name):
            yield spans
        compiling = run.timers.totals().get(COMPILE, 0.0) - before
        spans[name] = perf_counter() - started - compiling
        if compiling:
            spans[COMPILE] = compiling
        self.left.add(name, every, spans[name])

    def on_step(self, run: Run, finished: FinishedStep) -> None:
        step = run.state.step
        is_shown = step % self.every == 0 or step in (self.first_step, run.config.train.steps)
        energy = None
        if self.energy is not None and (is_shown or _saves(run)):  # what is lost if the run is killed is repeated
            energy = self.energy.lap(run.consumed_tokens)
        with attempt() as writing:  # only rank 0 writes; the next step's totals pass an error on to the other ranks
            self._write_step(run, finished, is_shown, energy)
        if writing.failed:
            run.pending = writing

    def on_end(self, run: Run, outcome: Outcome) -> None:
        if self.energy is not None:
            last = self.energy.lap(run.consumed_tokens)
            with attempt() as writing:  # an error must not cost the checkpoint that another callback saves
                if last is not None:
                    self.write({"step": run.state.step, "energy": last})
            if writing.failed:
                run.pending = writing
            self.show(self.energy.summary())

    def _energy_paused(self) -> AbstractContextManager[None]:
        return nullcontext() if self.energy is None else self.energy.paused()

    def _write_step(self, run: Run, finished: FinishedStep, is_shown: bool, energy: dict[str, float] | None) -> None:
        result, state = finished.result, run.state
        self.left.add_step(finished.work_seconds)
        samples_per_second = result.num_samples / finished.work_seconds
        tokens_per_second = samples_per_second * run.task.tokens_per_sample
        peak = None if self.peak_flops is None else self.peak_flops * dist.get_world_size()
        record: dict[str, Any] = {
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
            "peak_memory": peak_memory(run.device),
            "time": finished.spans,
        }
        if self.between:
            record["between"], self.between = self.between, {}
        if len(result.terms) > 1:
            record["terms"] = dict(result.terms)
        if run.loss_scale is not None:
            record["loss_scale"] = run.loss_scale.scale
        if energy is not None:
            record["energy"] = energy
        if is_shown and isinstance(run.loader.dataset, BlendedDataset):
            record["datasets"] = run.loader.dataset.progress(state.consumed_samples)
        if is_shown and result.routing.loads:
            record["experts"] = experts_record(result.routing)
        self.write(record)
        if result.skipped and run.loss_scale is None:
            log.warning("step %d skipped: loss %s, gradient norm %s", state.step, result.loss, result.grad_norm)
        if state.step == self.first_step:
            self.show(f"peak memory           {memory_so_far(run)}")
        if is_shown:
            self.show_progress(progress_line(record, run.config.train.steps, self.left.after(state.step)))

    def close(self) -> None:
        """Closes the file; nothing can be written after that."""
        if self.writer is not None:
            self.writer.close()


class HeldOutLoss(Callback):
    """Evaluates on each set of ``data.valid`` every ``train.evaluation.every`` steps, and after the last step."""

    def __init__(self, run: Run, metrics: Metrics) -> None:
        self.metrics = metrics
        self.every: int | None = None
        self.max_samples: int | None = None
        data, evaluation = run.config.data, run.config.train.evaluation
        if evaluation is not None:
            self.every, self.max_samples = evaluation.every, evaluation.samples
        self.datasets = {name: run.task.evaluation_dataset(prefix) for name, prefix in data.valid_sets.items()}

    def on_step(self, run: Run, finished: FinishedStep) -> None:
        last = run.state.step == run.config.train.steps
        if not self.datasets or not (last or (self.every is not None and run.state.step % self.every == 0)):
            return
        with self.metrics.timed(run, "evaluation", self.every) as time:
            found = {name: self._evaluate(run, dataset) for name, dataset in self.datasets.items()}
        step, deciding = run.state.step, next(iter(found.values()))
        if deciding.num_tokens:
            self.metrics.held_out = step, deciding.loss
        if numbers := _numbers(found):
            with agreed():
                self.metrics.write({"step": step, **numbers, "time": time})
        for name, evaluation in found.items():
            self.metrics.show(f"step {step}  {_told(name, evaluation)}")

    def _evaluate(self, run: Run, dataset: SizedSamples[Any]) -> Evaluation:
        return evaluate(
            run.task,
            run.pipeline,
            dataset,
            run.config.train.micro_batch_size,
            options=run.options,
            device=run.device,
            max_samples=self.max_samples,
        )


class TextSamples(Callback):
    """Writes the model's completions of the prompts in ``train.generation``, every so many steps and after the last.

    The constructor raises what ``Task.text_writer`` raises.
    """

    def __init__(self, run: Run, metrics: Metrics) -> None:
        self.metrics = metrics
        generation = run.config.train.generation
        self.every = None if generation is None else generation.every
        self.writer = None if generation is None else run.task.text_writer()

    def on_step(self, run: Run, finished: FinishedStep) -> None:
        step = run.state.step
        if self.writer is None or self.every is None or (step % self.every and step != run.config.train.steps):
            return
        with self.metrics.timed(run, "generation", self.every) as time:
            samples = self.writer(run.pipeline)
        with agreed():
            self.metrics.write({"step": step, "samples": [asdict(sample) for sample in samples], "time": time})
        for sample in samples:
            self.metrics.show("\n".join([f"step {step}  text after {sample.prompt!r}:", *_shown(sample.text)]))


class Checkpoints(Callback):
    """Saves every ``checkpoint.every`` steps and when the run ends, at most once per step.

    With ``checkpoint.keep_best``, also keeps the checkpoint with the lowest held-out loss besides the newest ones. With
    several validation sets, the first one decides. With ``checkpoint.async_save``, all but the last one are written
    by ``background``, while training continues.
    """

    def __init__(self, run: Run, metrics: Metrics, background: BackgroundSaver | None = None) -> None:
        self.metrics = metrics
        self.every, self.keep = run.config.checkpoint.every, run.config.checkpoint.keep
        config = run.config.checkpoint
        self.keep_best = config.keep_best
        self.background = background
        self.saved_step = run.state.step
        # (loss, step); only rank 0 knows the losses of earlier starts, and only rank 0 removes checkpoints
        self.best = _best_so_far(run) if self.keep_best and dist.get_rank() == 0 else None

    def on_step(self, run: Run, finished: FinishedStep) -> None:
        if _saves(run):
            self._save(run, self.background)
        elif self.background is not None and self.background.failed:
            with attempt() as saving:  # ranks may notice at different steps; the next step's totals gather them
                self.background.wait()
            if not run.pending.failed:
                run.pending = saving

    def on_end(self, run: Run, outcome: Outcome) -> None:
        if self.background is not None:
            self.background.wait()
        if run.state.step != self.saved_step:
            self._save(run, None)

    def _save(self, run: Run, background: BackgroundSaver | None) -> None:
        with self.metrics.timed(run, "checkpoint", self.every) as time:
            step, loss = self.metrics.held_out
            evaluated = step == run.state.step and math.isfinite(loss)
            if self.keep_best and evaluated and (self.best is None or loss < self.best[0]):
                self.best = loss, step
            save(run, self.keep, None if self.best is None else self.best[1], background)
        self.metrics.between = time
        self.saved_step = run.state.step


def _numbers(found: Mapping[str, Evaluation]) -> dict[str, Any]:
    """Returns the fields of metrics.jsonl (observe/metrics.py) for the evaluations in ``found`` that have a loss."""
    numbers: dict[str, Any] = {}
    first, *_ = found.values()
    if first.num_tokens:
        numbers = {"valid_loss": first.loss, "valid_tokens": first.num_tokens}
        if len(first.means) > 1:
            numbers["valid"] = dict(first.means)
        if first.classes:
            numbers["classes"] = list(first.classes)
    sets = {name: _numbers_of_set(each) for name, each in found.items() if name and each.num_tokens}
    return numbers | ({"valid_sets": sets} if sets else {})


def _numbers_of_set(evaluation: Evaluation) -> dict[str, Any]:
    loss = evaluation.loss
    numbers = {"loss": loss, "perplexity": perplexity(loss), "tokens": evaluation.num_tokens}
    return numbers | ({"means": dict(evaluation.means)} if len(evaluation.means) > 1 else {})


def _saves(run: Run) -> bool:
    """Returns whether a checkpoint is due after this step."""
    every = run.config.checkpoint.every
    return every is not None and run.state.step % every == 0


def _told(name: str, evaluation: Evaluation) -> str:
    """Returns the line that shows an evaluation to the user."""
    loss, of_which = evaluation.loss, f" of {name}" if name else ""
    if not evaluation.num_tokens:
        return f"held-out loss{of_which} not measured: none of the tokens read from {valid_setting(name)} has a loss"
    beside = f", perplexity {perplexity(loss):.2f}," if name and evaluation.counted == "tokens" else ""
    over = f"over {evaluation.num_tokens:,} {evaluation.counted}"
    return f"held-out loss{of_which} {loss:.4f}{beside} {over}{_others(evaluation)}"


def _others(evaluation: Evaluation) -> str:
    """Formats the other measures besides the loss, without entries of tables: "; sop 0.69, mlm_accuracy 0.25"."""
    found = ", ".join(f"{name} {mean:.4g}" for name, mean in list(evaluation.means.items())[1:] if "/" not in name)
    return f"; {found}" if found else ""


def _shown(text: str) -> list[str]:
    """Returns the first lines of ``text``, with characters that a terminal would interpret escaped."""
    lines = text.splitlines() or [""]
    kept = ["  | " + "".join(c if c.isprintable() else repr(c)[1:-1] for c in line) for line in lines[:_SHOWN_LINES]]
    return kept if len(lines) <= _SHOWN_LINES else [*kept, "  | ..."]


def _best_so_far(run: Run) -> tuple[float, int] | None:
    """Returns the lowest held-out loss of the run's saved checkpoints and its step; None if none was evaluated."""
    saved = set(complete_steps(run.checkpoints))
    deciding = next(iter(run.config.data.valid_sets))
    losses = [(held_out_loss(record, deciding), record["step"]) for record in read_metrics(run.folder)]
    evaluated = [(loss, step) for loss, step in losses if loss is not None and math.isfinite(loss)]
    return min(((loss, step) for loss, step in evaluated if step_name(step) in saved), default=None)
