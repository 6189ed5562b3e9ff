"""Decides where a run begins: at its own newest checkpoint, at the weights of another, or from scratch."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from megalith.checkpoint.background import BackgroundSaver
from megalith.checkpoint.folders import find_checkpoint, set_aside_damaged, step_name
from megalith.checkpoint.load import load_tensors
from megalith.checkpoint.save import STATE, save_checkpoint
from megalith.checkpoint.verify import verify_checkpoint
from megalith.config.yaml_text import write_override
from megalith.data.blend import identity_of_first, is_blend, weights_to_continue
from megalith.data.class_names import class_names, listed
from megalith.errors import CheckpointError, StorageError
from megalith.observe.units import duration
from megalith.storage import WAY_OUT, Location, Store, open_store
from megalith.topology.agreement import agreed, broadcast, everywhere, rank
from megalith.training.continuity import changed, comparable_settings, compared, kept_settings
from megalith.training.run import Run
from megalith.training.saves import note_save, refuse_if_saved
from megalith.training.state import SavedState, read_saved_state
from megalith.training.tasks.weights import load_weights

__all__ = ["Beginning", "note_saved", "resume_or_load", "save", "where_it_goes_on"]

log = logging.getLogger(__name__)

_LONGEST_SETTINGS = 1000  # characters of settings in a message


@dataclass(frozen=True)
class Beginning:
    """What ``resume_or_load`` did, in ``lines`` for the user; ``is_done``: no step is left, and nothing was loaded."""

    lines: list[str]
    is_done: bool = False


def save(run: Run, keep_last: int, best: int | None = None, background: BackgroundSaver | None = None) -> None:
    """Saves a checkpoint of this step; keeps the newest ``keep_last`` and that of step ``best``. Collective.

    With ``background``, which calls ``note_saved`` once it is complete, returns when the tensors are copied.
    """
    step = run.state.step
    with agreed(f"step {step} is not saved"):
        tensors, state = run.tensors(), run.state_dict()
    if background is not None:
        background.save(run.checkpoints, step, tensors, state, keep_last=keep_last, best=best)
        return
    started = perf_counter()
    path = save_checkpoint(run.checkpoints, step, tensors, state, keep_last=keep_last, best=best)
    if rank() == 0:
        note_saved(run.folder, step, path, perf_counter() - started)


def note_saved(folder: Path, step: int, path: Store, seconds: float) -> None:
    """Records in the run's ``folder`` that the checkpoint ``path`` is complete, and logs it. On one rank."""
    try:
        note_save(folder, step, path)
    except StorageError as error:  # the checkpoint is complete, and is found without the note
        log.warning("%s is saved, but %s", path, error)
    log.info("saved %s in %s", path, duration(seconds))


def where_it_goes_on(checkpoints: Location) -> str:
    """Returns a line that says what rerunning the command would do, for a run that has ended too early."""
    newest = find_checkpoint(checkpoints, warn=False)  # the run itself has warned, or will
    if newest is None:
        return "no checkpoint was saved; run the same command to start again from step 0"
    return f"run the same command to continue from step {int(open_store(newest).split()[1].removeprefix('step-'))}"


def resume_or_load(run: Run) -> Beginning:
    """Loads the state that ``run`` begins from.

    ``resume=auto`` continues from the newest sound checkpoint in the run's folder; newer damaged ones are renamed. If
    the folder shows that the run had saved, but no checkpoint is sound, this is an error: a run never starts over on
    top of an earlier one. In a new folder the initial weights come from ``load``, or from the seed.

    Raises:
        CheckpointError: on every rank, with nothing changed, if the checkpoint is damaged, or belongs to another model,
            other data or another seed.
    """
    load, layout = run.config.load, run.layout
    if run.config.resume == "auto":
        damaged: dict[str, CheckpointError] = {}
        while (path := find_checkpoint(run.checkpoints, but_not=damaged)) is not None:
            try:
                verify_checkpoint(path)
            except CheckpointError as error:
                damaged[path.split()[1]] = error
            else:
                if path.split()[1] != step_name(0):
                    return _resume(run, path, damaged)
                _refuse_to_forget(path, damaged)
                return _begin(run, path)
        _refuse_to_begin_again(run, damaged)
    if load is not None:
        return _begin(run, load)
    return Beginning([f"started at step 0 from seed {run.config.train.seed}, in layout {layout}"])


def _begin(run: Run, weights: str | Store) -> Beginning:
    """Starts at step 0 with existing weights: those of ``load``, or of an imported folder."""
    classes = class_names(run.data_identity)
    heads = load_weights(weights, run.weights(), run.chunks[0].head_names, run.task.class_heads, classes)
    lines = [f"started at step 0 from the weights of {weights}, in layout {run.layout}"]
    kinds = {
        "missing": heads.missing,
        "left out": heads.left_out,
        f"for other classes{_in_brackets(heads.classes)}": heads.replaced,
    }
    if told := [f"{what}: {', '.join(names)}" for what, names in kinds.items() if names]:
        lines.append(
            f"the head differs from that of {weights} ({'; '.join(told)}); what is missing or for other classes is "
            "initialized from the seed"
        )
    if heads.unnamed:
        lines.append(
            f"the {', '.join(heads.unnamed)} of {weights}{_in_brackets(heads.classes)} is used for the classes of the "
            f"training data{_in_brackets(classes)}; they cannot be compared, because not both have names"
        )
    return Beginning(lines)


def _in_brackets(classes: Sequence[str]) -> str:
    """Returns ``classes`` for a message; empty if their names are unknown."""
    return f" ({listed(classes)})" if classes else ""


def _refuse_to_forget(imported: Store, damaged: dict[str, CheckpointError]) -> None:
    """Raises CheckpointError, on every rank, if the run continued from ``imported`` but all its saves are damaged."""
    if damaged:
        told = "\n".join(map(str, damaged.values()))
        raise everywhere(
            CheckpointError(
                f"{told}\nthe run would start over from the weights of {imported}; restore a sound later checkpoint "
                f"beside it from a backup, or start in another folder: load={imported} run=..."
            )
        )


def _refuse_to_begin_again(run: Run, damaged: dict[str, CheckpointError]) -> None:
    """Calls ``refuse_if_saved`` on rank 0, since all ranks share the folder, and raises its error on every rank."""
    refusal = None
    with agreed():
        if rank() == 0:
            try:
                refuse_if_saved(run.folder, run.checkpoints, damaged)
            except CheckpointError as error:
                refusal = str(error)
    refusal = broadcast(refusal)
    if refusal is not None:
        raise everywhere(CheckpointError(refusal))


def _resume(run: Run, path: Store, damaged: dict[str, CheckpointError]) -> Beginning:
    """Continues from the verified checkpoint ``path``, and sets aside the newer ``damaged`` ones."""
    saved = read_saved_state(path)
    with agreed(f"{path} cannot be resumed"):
        if step_name(saved.train.step) != path.split()[1]:
            raise CheckpointError(
                f"train.step in {STATE} must match the folder's name; got {saved.train.step}; {WAY_OUT}"
            )
        _refuse_a_break(run, saved, path)
    step, steps = saved.train.step, run.config.train.steps
    lines = [str(error) for error in damaged.values()]
    if step >= steps:
        more = f"set train.steps above {step} to continue"
        return Beginning([*lines, f"nothing to do: {path} is at step {step}, and train.steps is {steps}; {more}"], True)
    changes = _told_changes(run, saved)
    try:
        load_tensors(path, run.tensors(), verify=False)
    except CheckpointError as error:
        raise everywhere(CheckpointError("\n".join([*changes, str(error)]))) from error
    run.load_state(saved)
    for name in damaged:
        aside = set_aside_damaged(run.checkpoints / name)
        lines.append(f"{name} is kept as {aside.split()[1]}")
    return Beginning([*lines, f"resumed from {path} at step {step}, now in layout {run.layout}", *changes])


def _refuse_a_break(run: Run, saved: SavedState, path: Store) -> None:
    """Raises CheckpointError if continuing would repeat or skip text."""
    problems, way_out, consumed = [], "undo these changes", saved.train.consumed_samples
    before, now = ({} if each is None else identity_of_first(each, consumed) for each in (saved.data, _identity(run)))
    if broken := changed(*({name: each[name] for name in compared(before, now)} for each in (before, now))):
        problems.append(f"the training data have changed: {', '.join(broken)}")
        way_out += _blend_from_here_on(saved.data or {}, run.data_identity, consumed)
    if saved.seed != (seed := run.config.train.seed):
        problems.append(f"its seed is {saved.seed} but train.seed is {seed}, which changes the data order and dropout")
        way_out = f"set train.seed={saved.seed}" + (" and undo the other changes" if broken else "")
    if problems:
        changes = "".join(f" ({line})" for line in _told_changes(run, saved) if saved.settings is not None)
        raise CheckpointError(
            f"{'; '.join(problems)}. Continuing would repeat or skip text{changes}; {way_out}, or start from its "
            f"weights only, in another folder: load={path} run=..."
        )


def _blend_from_here_on(before: Mapping[str, Any], now: Mapping[str, Any], consumed: int) -> str:
    """Returns the settings with which a run changes its blend from sample ``consumed`` on, after "undo these changes".

    Empty if it has none, or if the datasets that it has read are not among its datasets.
    """
    phases = weights_to_continue(before, now, consumed) if is_blend(now) else None
    if phases is None:
        return ""
    (_, weights), *later = phases
    entries = [{"first_sample": first, "weights": others} for first, others in later]
    settings = f"{write_override('data.weights', weights)} {write_override('data.phases', entries)}"
    return f", or change the blend from here on with {settings}" if len(settings) < _LONGEST_SETTINGS else ""


def _identity(run: Run) -> dict[str, Any]:
    """Returns what ``SavedState.data`` would be for this run."""
    return {"tokens_per_sample": run.task.tokens_per_sample, **run.data_identity}


def _told_changes(run: Run, saved: SavedState) -> list[str]:
    """Returns a line about settings that differ from the checkpoint's, and one about what cannot be compared."""
    if saved.settings is None or saved.data is None:
        return [
            "the checkpoint was written by an earlier version without its data and settings, so these are not compared"
        ]
    now = kept_settings(run.config)
    before = comparable_settings(saved.settings, now)
    lines = []
    if found := changed({**before, "layout": saved.layout}, {**now, "layout": run.layout}):
        lines.append(f"changed since step {saved.train.step}: {', '.join(found)}")
    if compared(saved.data, _identity(run)) == ["tokens_per_sample"]:
        lines.append(
            f"{type(run.task).__name__} does not identify its training data (data_identity), so changes go unnoticed"
        )
    return lines
