"""Inspects a dataset: counts, the first documents as text, and token frequencies."""

from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megalith.data.bracketed_text import bracketed_text
from megalith.data.conversations import holds_conversations, holds_pairs, learned_sequences
from megalith.data.indexed_dataset import IndexedDataset
from megalith.data.pairs.dataset import num_negatives_of
from megalith.data.sidecar import Sidecar
from megalith.data.token_ids import spread_chunks
from megalith.data.tokenizer import Tokenizer
from megalith.errors import ConfigError, DataError

__all__ = ["Inspection", "ShownDocument", "inspect_dataset"]

_SHOWN_TOKENS = 200  # per document
_ROLES = ("query", "positive", "negative")


@dataclass(frozen=True)
class ShownDocument:
    """The beginning of a document.

    Attributes:
        num_tokens: length of the whole document.
        text: its first 200 tokens as text, or their ids if the tokenizer is not known; in a conversation, those without
            a loss are in brackets; a pair has a line for each of its texts, which says what it is.
        is_cut: whether the document is longer than ``text``.
    """

    number: int
    num_tokens: int
    text: str
    is_cut: bool


@dataclass(frozen=True)
class Inspection:
    """The result of ``inspect_dataset``.

    Attributes:
        tokenizer: None if it is not known; ``why_no_tokenizer`` says why.
        document_lengths: [N], in tokens.
        token_ids, counts: the ids that occur, the most frequent first, and the count of each.
        num_negatives: [N], of each pair; None if the documents are not pairs.
        num_counted: number of tokens counted: all, or for a large file 67 million, evenly spread.
    """

    dataset: IndexedDataset
    tokenizer: Tokenizer | None
    why_no_tokenizer: str | None
    document_lengths: NDArray[np.int64]
    documents: list[ShownDocument]
    token_ids: NDArray[np.int64]
    counts: NDArray[np.int64]
    num_negatives: NDArray[np.int64] | None = None

    @property
    def num_counted(self) -> int:
        return int(self.counts.sum())

    @property
    def median_length(self) -> int:
        """Median document length in tokens; requires at least one document."""
        return int(np.median(self.document_lengths))

    @property
    def vocab_size(self) -> int | None:
        """Vocabulary size of the tokenizer, or the one recorded in the sidecar; None if neither is known."""
        if self.tokenizer is not None:
            return self.tokenizer.vocab_size
        return None if self.dataset.sidecar is None else self.dataset.sidecar.vocab_size

    def token_text(self, token_id: int) -> str | None:
        """The text of a token; None if the tokenizer is not known or does not have that token."""
        if self.tokenizer is None or not 0 <= token_id < self.tokenizer.vocab_size:
            return None
        return self.tokenizer.decode([token_id])


def inspect_dataset(prefix: str | Path, tokenizer: str | Path | None = None, num_documents: int = 3) -> Inspection:
    """Reads the dataset ``prefix`` and shows its first ``num_documents``.

    Args:
        tokenizer: path of a tokenizer.json; by default the one that the dataset names, if it exists.

    Raises:
        ConfigError: ``num_documents`` is below 0.
        DataError: the dataset or the given tokenizer cannot be read, or the tokenizer is not that of the dataset.
    """
    if num_documents < 0:
        raise ConfigError(f"the number of documents to show must be 0 or more; got {num_documents}; use 3")
    dataset = IndexedDataset(prefix)
    if dataset.dtype.kind == "f":
        raise DataError(f"{prefix} has dtype {dataset.dtype.name}; token ids must be integers, such as int32")
    found, why_not = _tokenizer(prefix, dataset.sidecar, tokenizer)
    token_ids, counts = _count(dataset)
    return Inspection(
        dataset=dataset,
        tokenizer=found,
        why_no_tokenizer=why_not,
        document_lengths=np.diff(dataset.document_starts()),
        documents=_first_documents(dataset, found, num_documents),
        token_ids=token_ids,
        counts=counts,
        num_negatives=num_negatives_of(dataset) if holds_pairs(dataset) else None,
    )


def _tokenizer(
    prefix: str | Path, sidecar: Sidecar | None, given: str | Path | None
) -> tuple[Tokenizer | None, str | None]:
    """The tokenizer, or the reason why it is not known."""
    eod = None if sidecar is None else sidecar.eod
    if given is not None:
        tokenizer = Tokenizer.load(given, eod)
        if sidecar is not None and sidecar.tokenizer_sha256 not in (None, tokenizer.sha256):
            raise DataError(f"{given} is not the tokenizer that made {prefix}; leave --tokenizer out")
        return tokenizer, None
    if sidecar is None or sidecar.tokenizer is None:
        return None, f"not recorded by {prefix}; give --tokenizer PATH"
    try:
        return Tokenizer.beside(prefix, sidecar.tokenizer, eod), None
    except DataError as error:
        return None, f"{error}; or give --tokenizer PATH"


def _first_documents(dataset: IndexedDataset, tokenizer: Tokenizer | None, number: int) -> list[ShownDocument]:
    starts = dataset.document_starts()[: number + 1].tolist()
    borders = dataset.sequence_starts()[1:]
    is_context = np.zeros(len(dataset), np.bool_)
    if holds_conversations(dataset):
        is_context = ~learned_sequences(dataset)
    found = []
    for document, (start, end) in enumerate(pairwise(starts)):
        shown = dataset.tokens[start : min(end, start + _SHOWN_TOKENS)].tolist()
        fits = tokenizer is not None and all(0 <= token_id < tokenizer.vocab_size for token_id in shown)
        decoder = tokenizer if fits else None
        sequences = np.searchsorted(borders, np.arange(start, start + len(shown)), side="right")
        if holds_pairs(dataset):
            text = _text_of_pair(shown, (sequences - dataset.document_indices[document]).tolist(), decoder)
        else:
            text = bracketed_text(shown, is_context[sequences].tolist(), decoder)
        found.append(ShownDocument(document, end - start, text, is_cut=end - start > len(shown)))
    return found


def _text_of_pair(shown: list[int], places: list[int], tokenizer: Tokenizer | None) -> str:
    """The texts of a pair, each after what it is; ``places`` says for each token which of its texts has it."""
    lines = []
    for place, both in groupby(zip(places, shown, strict=True), key=lambda both: both[0]):
        ids = [token_id for _, token_id in both]
        lines.append(f"{_ROLES[min(place, 2)]:<10}{bracketed_text(ids, [False] * len(ids), tokenizer)}")
    return "\n".join(lines)


def _count(dataset: IndexedDataset) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ids that occur and their counts, the most frequent first; ties by id."""
    ids, counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for _, chunk in spread_chunks(dataset):
        chunk_ids, chunk_counts = np.unique(chunk, return_counts=True)
        ids, place = np.unique(np.concatenate((ids, chunk_ids.astype(np.int64))), return_inverse=True)
        counts = np.bincount(place, np.concatenate((counts, chunk_counts))).astype(np.int64)
    order = np.argsort(-counts, kind="stable")
    return ids[order], counts[order]
