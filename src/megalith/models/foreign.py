"""Models that another system wrote: a folder of Hugging Face, or a checkpoint of Megatron-Core."""

from pathlib import Path

from megalith.models.hf import ModelFolder, is_model_folder, open_folder
from megalith.models.megatron import MegatronFolder, is_megatron_folder, open_megatron_folder
from megalith.storage import Store, open_store

__all__ = ["ForeignModel", "foreign_model"]

ForeignModel = ModelFolder | MegatronFolder


def foreign_model(location: str | Path | Store) -> ForeignModel | None:
    """The model at ``location`` with everything checked but the values of its tensors; None if it is none of these.

    Raises:
        CheckpointError: it is damaged.
        ConfigError: our model cannot represent it.
    """
    store = open_store(location)
    if is_megatron_folder(store):
        return open_megatron_folder(store)
    return open_folder(store) if is_model_folder(store) else None
