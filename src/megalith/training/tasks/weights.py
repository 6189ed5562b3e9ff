"""The weights of a model, from whatever holds them: a checkpoint of ours, or the model of another system."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from megalith.checkpoint.load import load_stored, load_tensors
from megalith.config import TransformerConfig
from megalith.models.foreign import foreign_model
from megalith.storage import Store, open_store
from megalith.topology.agreement import agreed

__all__ = ["described_at", "is_weight", "load_weights"]


def is_weight(name: str) -> bool:
    """Whether the tensor ``name`` of a checkpoint is of the model, and not of its optimizer."""
    return not name.startswith("optimizer.")


def described_at(location: str | Path | Store) -> TransformerConfig | None:
    """What the model of another system at ``location`` is; None if there is none.

    Raises CheckpointError if it is damaged, ConfigError if our model cannot represent it.
    """
    folder = foreign_model(location)
    return None if folder is None else folder.config


def load_weights(location: str | Path | Store, into: Mapping[str, Tensor]) -> None:
    """Fills the weights ``into`` by name, in any layout and of any floating dtype; all ranks call it.

    Each rank reads no more than its own parts.

    Raises:
        CheckpointError: what is at ``location`` is damaged, or does not fit; on every rank, with nothing changed.
        ConfigError: our model cannot represent the one there.
    """
    store = open_store(location)
    with agreed(f"{store} cannot be loaded"):
        folder = foreign_model(store)
    if folder is None:
        load_tensors(store, into, only=is_weight, cast=True)
    else:
        load_stored(folder.weights, into, cast=True)
