"""Models saved by other systems: a Hugging Face folder or a Megatron-Core checkpoint."""

from pathlib import Path

from megalith.models.hf import ModelFolder, is_model_folder, open_folder
from megalith.models.megatron import MegatronFolder, is_megatron_folder, open_megatron_folder
from megalith.storage import Store, open_store

__all__ = ["ForeignModel", "foreign_model"]

ForeignModel = ModelFolder | MegatronFolder


def foreign_model(location: str | Path | Store) -> ForeignModel | None:
    """Opens the model at ``location``, checking all but its tensors' values; returns None for any other format.

    Raises:
        CheckpointError: the model is damaged.
        ConfigError: Megalith cannot represent the model.
    """
    store = open_store(location)
    if is_megatron_folder(store):
        return open_megatron_folder(store)
    return open_folder(store) if is_model_folder(store) else None
