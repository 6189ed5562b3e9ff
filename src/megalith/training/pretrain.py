"""Trains a run: takes a resolved config and writes a trained run folder."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist

from megalith.checkpoint.background import BackgroundSaver
from megalith.config import RunConfig
from megalith.errors import ConfigError
from megalith.fusions.core.preference import without_compiling
from megalith.observe.compiler_wait import CompilerWait
from megalith.observe.energy_monitor import EnergyMonitor
from megalith.observe.energy_sources import EnergySource, energy_source
from megalith.observe.run_log import RunLog
from megalith.observe.trackers import Trackers
from megalith.resilience.stop_request import TIME_LIMIT, StopRequest
from megalith.storage.run_lock import RunLock
from megalith.topology.agreement import agreed
from megalith.training.about import write_about
from megalith.training.callbacks import Checkpoints, HeldOutLoss, Metrics, TextSamples
from megalith.training.energy_of_steps import EnergyOfSteps
from megalith.training.expert_loads import CollapseAlarm
from megalith.training.freed_memory import FreedMemory
from megalith.training.loop import Callback, Outcome, train
from megalith.training.planned_data import planned_data, planned_samples
from megalith.training.process_group import choose_device, process_group
from megalith.training.resume import note_saved, resume_or_load
from megalith.training.run import Run
from megalith.training.run_folder import keep_settings, keep_tokenizer
from megalith.training.setup import RunParts, build_run

__all__ = ["pretrain"]


def pretrain(
    config: RunConfig,
    show: Callable[[str], None],
    show_progress: Callable[[str], None],
    parts: RunParts | None = None,
    origin: Mapping[str, str] = MappingProxyType({}),
    stop: StopRequest | None = None,
) -> Outcome:
    """Trains according to ``config``, which preflight has resolved. Called on every rank.

    Writes config.yaml, about.json, tokenizer.json, metrics.jsonl, logs/ and checkpoints/ into the folder
    ``config.run``. On rank 0, ``show`` receives lines for the user, and ``show_progress`` lines that may each replace
    the previous one. ``parts`` replaces built-in parts with the user's own. ``origin`` is recorded in about.json: the
    recipe and the command that started the run. ``stop``, if given, must already be entered; otherwise signals are
    handled from here on.

    A run that has already done all its steps writes nothing.

    Raises:
        MegalithError: on every rank; no existing data is lost.
    """
    device = choose_device()
    with ExitStack() as stack:
        stop = stop or stack.enter_context(StopRequest(show))
        stop.limit_time(config.train.time_limit)
        stack.enter_context(process_group(device))
        stack.enter_context(_locked(Path(config.run)))
        if dist.get_rank() != 0:
            show = show_progress = _say_nothing
        source = _energy_source(config, device, stack)
        run = build_run(config, device, parts)
        beginning = resume_or_load(run)
        with agreed():
            if dist.get_rank() == 0 and not beginning.is_done:
                run_log = stack.enter_context(RunLog(run.folder / "logs" / "run.log"))
                show, show_progress = run_log.kept(show), run_log.kept(show_progress)
        if beginning.is_done:
            _show_all(beginning.lines, show)
            return Outcome.WAS_DONE
        background = _background_saver(run, stack)
        energy = None if source is None else EnergyOfSteps(EnergyMonitor(source, device), run.consumed_tokens)
        with agreed():
            trackers = _trackers(run, stack)
            metrics = stack.enter_context(closing(Metrics(run, show, show_progress, trackers, energy)))
            callbacks = _callbacks(run, metrics, parts, background)
            if dist.get_rank() == 0:
                keep_settings(run)
                keep_tokenizer(run)
                write_about(run, origin)
        _show_all([*beginning.lines, *_remarks(run)], show)  # after everything that reads the user's files
        first_step = run.state.step
        if config.train.compile_fusions is False:
            stack.enter_context(without_compiling())
        if energy is not None:
            energy.start()
        with CompilerWait(run.timers, show, show_progress).watched():
            outcome = train(run, callbacks, stop)
        if outcome is Outcome.STOPPED:
            show(_where_it_stopped(run, first_step, stop.reason))
        return outcome


def _energy_source(config: RunConfig, device: torch.device, stack: ExitStack) -> EnergySource | None:
    """Opens this rank's energy counter, which ``stack`` closes; None unless the run logs energy."""
    if not config.train.log_energy:
        return None
    with agreed():
        try:
            source = stack.enter_context(closing(energy_source(device)))
        except ConfigError as error:
            reason = f"train.log_energy cannot measure here: {error}; set train.log_energy=false to train without it"
            raise ConfigError(reason) from error
    return source


def _background_saver(run: Run, stack: ExitStack) -> BackgroundSaver | None:
    """Returns what writes checkpoints while training continues, if the run wants it. Collective.

    ``stack`` waits for a checkpoint that is being written, also when the run ends with an error.
    """
    if not run.config.checkpoint.async_save:
        return None
    saver = BackgroundSaver(partial(note_saved, run.folder))
    stack.push(lambda kind, error, trace: saver.close(error))
    return saver


def _callbacks(
    run: Run, metrics: Metrics, parts: RunParts | None, background: BackgroundSaver | None
) -> list[Callback]:
    """Returns the callbacks of a run, in their order."""
    checkpoints = Checkpoints(run, metrics, background)
    ours = (HeldOutLoss(run, metrics), TextSamples(run, metrics), checkpoints, CollapseAlarm())
    return [metrics, *ours, *(parts.callbacks if parts else ()), FreedMemory(run)]


def _trackers(run: Run, stack: ExitStack) -> Trackers:
    """Opens the trackers of rank 0, which ``stack`` closes; other ranks have none."""
    names = run.config.tracking if dist.get_rank() == 0 else ()
    settings = run.config.model_dump(mode="json")
    return stack.enter_context(closing(Trackers(run.folder, names, resumed_step=run.state.step, settings=settings)))


def _remarks(run: Run) -> list[str]:
    """Returns how much of each dataset the run will read, and what the user may not expect of it on this device."""
    planned = planned_data(run.loader.dataset, planned_samples(run.config, run.pg_collection.size("dp")))
    if run.config.precision.fp8 is None or (run.device.type != "cpu" and run.config.precision.dtype != "float64"):
        return planned
    return [*planned, "FP8 GEMMs are emulated, on a CPU and in float64: a step takes two to three times as long"]


def _where_it_stopped(run: Run, first_step: int, reason: str | None) -> str:
    """Returns a line that says what was saved, and why if the time limit ended the run.

    If a signal ended it, the user was already told on arrival of the signal.
    """
    step, why = run.state.step, ""
    if reason == TIME_LIMIT:
        limit = run.config.train.time_limit
        why = f"train.time_limit ({limit:g} minute{'s' * (limit != 1)}) has passed"
        if step == first_step:
            return f"{why} before the first step, because startup takes longer than that; raise it"
        why += ": "
    if step == 0:
        return f"{why}stopped before the first step, with nothing to save; run the same command to start again"
    return f"{why}saved at step {step}; run the same command to continue from there"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Locks the run's folder. Rank 0 holds the lock; if it cannot be taken, all ranks raise."""
    with ExitStack() as held:
        with agreed():
            if dist.get_rank() == 0:
                held.enter_context(RunLock(folder))
        yield


def _show_all(lines: Sequence[str], show: Callable[[str], None]) -> None:
    for line in lines:
        show(line)


def _say_nothing(line: str) -> None:
    """Discards the line; used on ranks other than 0."""
