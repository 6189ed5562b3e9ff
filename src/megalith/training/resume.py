"""Where a run begins: at its own newest checkpoint, at the weights of another, or at nothing."""

from megalith.checkpoint.folders import find_checkpoint, set_aside_damaged
from megalith.checkpoint.load import load_tensors, read_state
from megalith.checkpoint.save import save_checkpoint
from megalith.checkpoint.verify import verify_checkpoint
from megalith.errors import CheckpointError
from megalith.storage import Store
from megalith.topology.agreement import agreed, everywhere
from megalith.training.run import Run

__all__ = ["resume_or_load", "save"]


def save(run: Run, keep_last: int, best: int | None = None) -> Store:
    """Writes a checkpoint of this step and keeps the newest ``keep_last``, and that of step ``best``; collective."""
    with agreed(f"step {run.state.step} is not saved"):
        tensors, state = run.tensors(), run.state_dict()
    return save_checkpoint(run.checkpoints, run.state.step, tensors, state, keep_last=keep_last, best=best)


def resume_or_load(run: Run) -> str:
    """Brings ``run`` to where it begins and says in one line what it did.

    ``resume=auto`` continues from the newest complete checkpoint in the run's folder. A damaged one is renamed, the
    line says so, and the one before it is taken. Without any, the first weights come from ``load``, or from the seed.

    Raises:
        CheckpointError: on every rank; what was found belongs to another model or seed, or ``load`` is damaged.
    """
    notes = []
    resume, load = run.config.resume, run.config.load
    while resume == "auto" and (path := find_checkpoint(run.checkpoints)) is not None:
        try:
            verify_checkpoint(path)
        except CheckpointError as error:
            aside = set_aside_damaged(path)
            notes.append(f"{error}; it is kept as {aside.split()[1]}")
            continue
        state = read_state(path)
        load_tensors(path, run.tensors(), verify=False)
        with agreed():
            run.load_state_dict(state)
        return "; ".join([*notes, f"resumed from {path} at step {run.state.step}, now in layout {run.layout}"])
    if notes:
        raise everywhere(
            CheckpointError(
                f"{'; '.join(notes)}; no sound checkpoint is left in {run.checkpoints}: copy one there from a backup, "
                "or start anew in another folder with run=..."
            )
        )
    if load is not None:
        load_tensors(load, run.weights(), only=lambda name: not name.startswith("optimizer."))
        return f"started at step 0 from the weights of {load}, in layout {run.layout}"
    return f"started at step 0 from seed {run.config.train.seed}, in layout {run.layout}"
