"""Detects that a run has saved although its checkpoints are gone, so that it does not start over on top of its results.

``RUN/saved.json`` records which step was saved last, and where. If it is missing, as in the folder of an earlier
version or of a run that was killed at the end of its first save, metrics that go past the first ``checkpoint.every`` of
``config.yaml``, or to its ``train.steps``, show the same (with ``checkpoint.async_save``, only those that go past the
second one); if that file cannot be read, a save is assumed. A run that was killed before its first save has neither,
and starts again at step 0.
"""

from collections.abc import Mapping
from pathlib import Path

from megalith.checkpoint.folders import LATEST, traces_of_saves
from megalith.config.dotted import look_up
from megalith.errors import CheckpointError
from megalith.observe.metrics import read_metrics
from megalith.storage import Store, explained, read_manifest, write_json_atomic
from megalith.training.kept import recorded_settings

__all__ = ["note_save", "refuse_if_saved"]

_NOTE = "saved.json"


def note_save(run_folder: Path, step: int, checkpoint: Store) -> None:
    """Writes RUN/saved.json. Raises StorageError."""
    with explained("write", run_folder / _NOTE):
        run_folder.mkdir(parents=True, exist_ok=True)
    write_json_atomic(run_folder / _NOTE, {"step": step, "checkpoint": str(checkpoint)})


def refuse_if_saved(run_folder: Path, checkpoints: Store, damaged: Mapping[str, CheckpointError]) -> None:
    """Raises CheckpointError if the run in ``run_folder`` has saved, but none of its checkpoints is sound.

    Otherwise removes a note left by an earlier run. ``damaged``: the errors of checkpoints that have a manifest but are
    not sound.
    """
    traces = traces_of_saves(checkpoints)
    metrics = run_folder / "metrics.jsonl"
    last_step = max((record["step"] for record in read_metrics(run_folder)), default=0) if metrics.is_file() else 0
    noted, known_at = (run_folder / _NOTE).exists(), _known_to_save_at(run_folder)
    lost = last_step > 0 and (noted or known_at is None or last_step >= known_at)
    if not (traces or lost):
        with explained("remove", run_folder / _NOTE):
            # it belongs to a run whose metrics were moved away, and would wrongly show that this run had saved
            (run_folder / _NOTE).unlink(missing_ok=True)
        return
    steps = [name for name in traces if name != LATEST] or traces
    reasons = [str(damaged[name]) if name in damaged else _why(checkpoints, name) for name in steps]
    if last_step:
        reasons.append(f"{metrics} goes up to step {last_step}")
    if lost and not noted and known_at is None:
        reasons.append(f"{run_folder / 'config.yaml'}, which would show whether the run has saved, cannot be read")
    to_move = [str(metrics)] * metrics.exists() + [str(checkpoints)] * bool(traces)
    raise CheckpointError(
        f"this run has saved before, but no sound checkpoint is left in {checkpoints}:\n  "
        + "\n  ".join(reasons)
        + "\nit will not start over on top of its earlier results: restore a checkpoint there from a backup, or start "
        f"in another folder with run=...; to start over in this one, move {' and '.join(to_move)} away"
    )


def _known_to_save_at(run_folder: Path) -> int | None:
    """Returns the step whose record proves that the run has saved; None if its settings cannot be read.

    A run saves at its last step. At an earlier one it may have been killed between record and save, so the next record
    is the proof; with ``checkpoint.async_save`` only the one after the second save, which waits for the first.
    """
    settings = recorded_settings(run_folder)
    if settings is None:
        return None
    every, steps = look_up(settings, "checkpoint.every"), look_up(settings, "train.steps")
    if not isinstance(steps, int):
        return None
    if not isinstance(every, int):
        return steps
    return 2 * every + 1 if look_up(settings, "checkpoint.async_save") else min(steps, every + 1)


def _why(checkpoints: Store, name: str) -> str:
    """Says why the trace ``name`` of a save is not a checkpoint to resume from."""
    folder = checkpoints / name
    if name == LATEST:
        return f"{folder} names a checkpoint"
    if ".damaged" in name:
        return f"{folder} was set aside as damaged"
    try:
        read_manifest(folder)
    except CheckpointError as error:
        return str(error)
    return f"{folder} lacks files listed in its manifest, or their sizes differ"
