"""What shows that a run has saved, when its checkpoints are gone: it must not begin again over what it has done.

``RUN/saved.json`` says which step was saved last, and where. Without it, as in the folder of an earlier version or of a
run that was killed at the end of its first save, metrics that go past the first ``checkpoint.every`` of ``config.yaml``
show the same. A run that was killed before its first save has neither, and begins again at step 0.
"""

from collections.abc import Mapping
from pathlib import Path

from megalith.checkpoint.folders import LATEST, traces_of_saves
from megalith.config.dotted import look_up
from megalith.config.yaml_text import read_yaml
from megalith.errors import CheckpointError, ConfigError
from megalith.observe.metrics import read_metrics
from megalith.storage import Store, explained, read_manifest, write_json_atomic

__all__ = ["note_save", "refuse_if_saved"]

_NOTE = "saved.json"


def note_save(run_folder: Path, step: int, checkpoint: Store) -> None:
    """Writes RUN/saved.json. Raises StorageError."""
    with explained("write", run_folder / _NOTE):
        run_folder.mkdir(parents=True, exist_ok=True)
    write_json_atomic(run_folder / _NOTE, {"step": step, "checkpoint": str(checkpoint)})


def refuse_if_saved(run_folder: Path, checkpoints: Store, damaged: Mapping[str, CheckpointError]) -> None:
    """Raises CheckpointError if the run in ``run_folder`` has saved, none of whose checkpoints is sound.

    Otherwise removes a note that an earlier run has left. ``damaged``: why those are not sound whose manifest is.
    """
    traces = traces_of_saves(checkpoints)
    metrics = run_folder / "metrics.jsonl"
    last_step = max((record["step"] for record in read_metrics(run_folder)), default=0) if metrics.is_file() else 0
    lost = last_step > 0 and ((run_folder / _NOTE).exists() or _is_past_a_save(run_folder, last_step))
    if not (traces or lost):
        with explained("remove", run_folder / _NOTE):
            # it is of a run whose metrics were moved away, and would say of this one that it had saved
            (run_folder / _NOTE).unlink(missing_ok=True)
        return
    steps = [name for name in traces if name != LATEST] or traces
    reasons = [str(damaged[name]) if name in damaged else _why(checkpoints, name) for name in steps]
    if last_step:
        reasons.append(f"{metrics} goes to step {last_step}")
    to_move = [str(metrics)] * metrics.exists() + [str(checkpoints)] * bool(traces)
    raise CheckpointError(
        f"this run has saved, and no sound checkpoint is left in {checkpoints}:\n  "
        + "\n  ".join(reasons)
        + "\nit does not begin again over what it has done: copy a checkpoint there from a backup, or start in another "
        f"folder with run=...; to begin again in this one, move {' and '.join(to_move)} away"
    )


def _is_past_a_save(run_folder: Path, last_step: int) -> bool:
    """Whether the settings of the last start had it save before ``last_step``."""
    path = run_folder / "config.yaml"
    try:
        every = look_up(read_yaml(path.read_text("utf-8"), str(path)), "checkpoint.every")
    except (OSError, UnicodeDecodeError, ConfigError):
        return False
    # at that step itself, the run may have been killed between its record and its save
    return isinstance(every, int) and last_step > every


def _why(checkpoints: Store, name: str) -> str:
    """Why the trace ``name`` of a save is no checkpoint to go on from."""
    folder = checkpoints / name
    if name == LATEST:
        return f"{folder} names a checkpoint"
    if ".damaged" in name:
        return f"{folder} was set aside as damaged"
    try:
        read_manifest(folder)
    except CheckpointError as error:
        return str(error)
    return f"{folder} lacks files that its manifest lists, or has them in other sizes"
