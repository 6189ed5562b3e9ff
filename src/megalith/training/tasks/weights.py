"""Loads the weights of a model from a Megalith checkpoint or from the model of another system."""

from collections.abc import Mapping, Set
from pathlib import Path

from torch import Tensor

from megalith.checkpoint.load import load_stored, open_tensors
from megalith.checkpoint.verify import verify_checkpoint
from megalith.config import TransformerConfig
from megalith.models.foreign import foreign_model
from megalith.storage import Store, open_store
from megalith.topology.agreement import agreed, all_gather

__all__ = ["described_at", "is_weight", "load_weights"]


def is_weight(name: str) -> bool:
    """Returns whether the tensor ``name`` of a checkpoint belongs to the model and not to its optimizer."""
    return not name.startswith("optimizer.")


def described_at(location: str | Path | Store) -> TransformerConfig | None:
    """Returns the config of the foreign model at ``location``; None if there is none.

    Raises CheckpointError if it is damaged, ConfigError if our model cannot represent it.
    """
    folder = foreign_model(location)
    return None if folder is None else folder.config


def load_weights(
    location: str | Path | Store, into: Mapping[str, Tensor], heads: Set[str] = frozenset()
) -> dict[str, list[str]]:
    """Fills the weights ``into`` by name, in any layout and any floating-point dtype. Collective.

    Each rank reads only its own parts.

    Args:
        heads: modules that may differ between models for different purposes: one that is missing at ``location`` stays
            as it is in ``into``, and one that the model does not have is not read.

    Returns:
        The names of both kinds of heads, sorted, as "missing" and "left out".

    Raises:
        CheckpointError: on every rank, with nothing changed, if the weights at ``location`` are damaged or do not fit.
        ConfigError: our model cannot represent the one there.
    """
    store = open_store(location)
    with agreed(f"{store} cannot be loaded"):
        folder = foreign_model(store)
    if folder is None:
        verify_checkpoint(store)
    with agreed(f"{store} cannot be loaded"):
        stored = open_tensors(store, is_weight) if folder is None else folder.weights
    there = heads & set(map(_module, stored.tensors))
    wanted = heads & {module for names in all_gather(sorted(set(map(_module, into)))) for module in names}
    load_stored(
        stored.only(lambda name: _module(name) not in there - wanted),
        {name: tensor for name, tensor in into.items() if _module(name) not in wanted - there},
        cast=True,
    )
    return {"missing": sorted(wanted - there), "left out": sorted(there - wanted)}


def _module(name: str) -> str:
    """Returns the top-level module that the tensor ``name`` belongs to."""
    return name.split(".", 1)[0]
