"""Settings of a run that starts from a trained model: its shape, and where its weights are."""

from pathlib import Path
from typing import Any

from megalith.config import TransformerConfig, read_tree
from megalith.models.foreign import foreign_model
from megalith.storage import open_store
from megalith.training.run_folder import open_run

__all__ = ["settings_from", "usual_settings"]


def settings_from(location: str, source: str | Path | None) -> dict[str, Any]:
    """A tree of settings for ``load_run``: those of ``source``, with the model at ``location``, whose weights it loads.

    Args:
        location: a model folder of Hugging Face, a run's folder, or a checkpoint, of ours or of Megatron-Core.
        source: as in ``load_run``; None for the ``usual_settings``.

    Raises:
        CheckpointError: ``location`` holds no model, or a damaged one.
        ConfigError: our model cannot represent it, or ``source`` cannot be read.
    """
    store = open_store(location)
    if (folder := foreign_model(store)) is not None:
        model, load = folder.config, store
        usual = usual_settings(model, folder.num_positions, folder.weights.dtype)
    else:
        load, _, run = open_run(store)
        model = run.model
        usual = usual_settings(model, run.data.seq_length, run.precision.dtype)
    return {**(usual if source is None else read_tree(source)), "model": usual["model"], "load": str(load)}


def usual_settings(model: TransformerConfig, seq_length: int, dtype: str) -> dict[str, Any]:
    """A tree of settings to go on training ``model`` with, all of which may be overridden; it names no data."""
    return {
        "model": model,
        "data": {"seq_length": seq_length},
        "train": {"steps": 1000, "global_batch_size": 16, "micro_batch_size": 1},
        "optim": {"lr": 1e-5},
        "precision": {"dtype": dtype},
    }
