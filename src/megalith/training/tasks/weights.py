"""Loads the weights of a model from a Megalith checkpoint or from the model of another system."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from megalith.checkpoint.load import load_stored, open_tensors
from megalith.checkpoint.verify import verify_checkpoint
from megalith.config import TransformerConfig
from megalith.models.foreign import ForeignModel, foreign_model
from megalith.storage import Store, open_store
from megalith.topology.agreement import agreed, all_gather
from megalith.training.state import read_class_names

__all__ = ["LoadedHeads", "described_at", "is_weight", "load_weights"]


@dataclass(frozen=True)
class LoadedHeads:
    """How the heads of two models differ.

    Attributes:
        missing: heads that only the model to fill has; they stay as they were.
        left_out: heads that only the stored model has.
        replaced: heads that both have, but for other classes; they stay as they were.
        unnamed: heads that were read although nothing tells whether their classes are the same.
        classes: the class names of the stored model; empty if unknown.
    """

    missing: Sequence[str]
    left_out: Sequence[str]
    replaced: Sequence[str]
    unnamed: Sequence[str]
    classes: Sequence[str]


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
    location: str | Path | Store,
    into: Mapping[str, Tensor],
    heads: Set[str] = frozenset(),
    class_heads: Set[str] = frozenset(),
    classes: Sequence[str] = (),
) -> LoadedHeads:
    """Fills the weights ``into`` by name, in any layout and any floating-point dtype. Collective.

    Each rank reads only its own parts.

    Args:
        heads: modules that may differ between models for different purposes: one that is missing at ``location`` stays
            as it is in ``into``, and one that the model does not have is not read.
        class_heads: those of ``heads`` that score ``classes``. They are read only if those at ``location`` are as many
            and, where both have names, have the same names in the same order.
        classes: names in order; empty if unknown.

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
    learned = _class_names(store, folder) if class_heads else ()
    are_others = bool(learned and classes) and tuple(classes) != learned
    resized = {_module(name) for name in into.keys() & stored.tensors if into[name].shape != stored.tensors[name].shape}
    # only the ranks of the last stage see the sizes of a head
    mine = sorted(set(map(_module, into))), sorted(class_heads if are_others else class_heads & resized)
    modules, others = (set[str]().union(*names) for names in zip(*all_gather(mine), strict=True))
    there, wanted = heads & set(map(_module, stored.tensors)), heads & modules
    read = (there & wanted) - others
    load_stored(
        stored.only(lambda name: _module(name) not in there - read),
        {name: tensor for name, tensor in into.items() if _module(name) not in wanted - read},
        cast=True,
    )
    return LoadedHeads(
        missing=sorted(wanted - there),
        left_out=sorted(there - wanted),
        replaced=sorted((there & wanted) - read),
        unnamed=[] if learned and classes else sorted(read & class_heads),
        classes=learned,
    )


def _class_names(store: Store, folder: ForeignModel | None) -> tuple[str, ...]:
    return read_class_names(store) if folder is None else folder.class_names


def _module(name: str) -> str:
    """Returns the top-level module that the tensor ``name`` belongs to."""
    return name.split(".", 1)[0]
