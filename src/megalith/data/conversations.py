"""Datasets that hold something else than plain texts: conversations, and pairs of a query and a passage.

``Sidecar.conversations`` and ``Sidecar.pairs`` say what their sequences are.
"""

import numpy as np
from numpy.typing import NDArray

from megalith.data.indexed_dataset import IndexedDataset
from megalith.errors import DataError

__all__ = ["holds_conversations", "holds_pairs", "learned_sequences", "require_text"]


def holds_conversations(dataset: IndexedDataset) -> bool:
    """Whether only some tokens of ``dataset`` have a loss."""
    return dataset.sidecar is not None and dataset.sidecar.conversations


def holds_pairs(dataset: IndexedDataset) -> bool:
    """Whether each document of ``dataset`` is a query, its positive passage, and hard negatives."""
    return dataset.sidecar is not None and dataset.sidecar.pairs


def learned_sequences(dataset: IndexedDataset) -> NDArray[np.bool_]:
    """bool [S], for each sequence of ``dataset`` whether it is learned: the second of its document, the fourth, ..."""
    firsts = dataset.document_indices
    is_learned: NDArray[np.bool_] = (np.arange(len(dataset)) - np.repeat(firsts[:-1], np.diff(firsts))) % 2 == 1
    return is_learned


def require_text(dataset: IndexedDataset) -> None:
    """Raises DataError if ``dataset`` holds conversations, most of which has no loss, or pairs, which are no text."""
    if holds_conversations(dataset):
        raise DataError(
            f"{dataset.prefix} must contain texts; it holds conversations (megalith data chat), on which only a GPT is "
            "trained; prepare texts with: megalith data prepare"
        )
    if holds_pairs(dataset):
        raise DataError(
            f"{dataset.prefix} must contain texts; it holds pairs of a query and a passage (megalith data pairs), on "
            "which only an embedding model is trained; prepare texts with: megalith data prepare"
        )
