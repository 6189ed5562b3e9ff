"""Base of the BERT, T5 and inverse cloze datasets: samples of packed sentences, computed from the sample index.

Every epoch has the same packs of sentences (``sentence_packing.py``). Epoch e visits them in an order keyed by (seed,
e), and what sample i draws is drawn from (seed, i), so it differs between epochs. Sample i depends only on (data,
tokenizer, settings, seed, i), not on batch size, number of ranks or length of the run.
"""

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from megalith.config.masking_config import LongSentences
from megalith.data.conversations import require_text
from megalith.data.fingerprint import fingerprint
from megalith.data.indexed_dataset import IndexedDataset
from megalith.data.sentence_packing import pack_sentences
from megalith.data.token_ids import check_sample
from megalith.data.tokenizer import Tokenizer
from megalith.errors import ConfigError, DataError
from megalith.numerics.draws import Draws
from megalith.numerics.permutation import KeyedPermutation
from megalith.wording import counted

__all__ = ["HeldOutSamples", "Packing", "SentenceDataset"]

log = logging.getLogger(__name__)

_DRAWS = "masks"  # the samples of BERT and T5 follow from this name

Sample = TypeVar("Sample")
Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class Packing:
    """How sentences become samples.

    Attributes:
        room: maximum number of text tokens in a sample.
        longest: maximum number of tokens of a sentence, at most ``room``.
        min_sentences: minimum number of sentences in a sample.
        long_sentences: what to do with longer ones.
        short_sequence_probability: share of samples that get a random shorter length.
    """

    room: int
    longest: int
    min_sentences: int
    long_sentences: LongSentences
    short_sequence_probability: float

    def __str__(self) -> str:
        limit = "" if self.longest == self.room else f" of up to {self.longest} tokens"
        return (
            f"{self.min_sentences} sentences or more{limit}, long ones: {self.long_sentences}, "
            f"short samples: {self.short_sequence_probability}"
        )


class SentenceDataset(ABC, Generic[Sample]):
    """Samples of whole sentences without end: every index from 0 on is valid.

    Args:
        dataset: the dataset or its prefix; its sequences are sentences.
        tokenizer: the tokenizer that encoded the dataset.
        packing: how many sentences a sample has.
        seed: seed of target lengths, order and draws.
        vocab_size: vocabulary size of the model that reads the samples; None: unknown.

    Attributes:
        num_samples: number of samples per epoch.

    Raises:
        ConfigError: samples are too short to hold text.
        DataError: the files cannot be read, do not hold token ids, hold conversations or pairs, are not split into
            sentences, have sentences that are too long, or have no document with enough sentences for a sample.
    """

    def __init__(
        self,
        dataset: str | Path | IndexedDataset,
        tokenizer: Tokenizer,
        packing: Packing,
        seed: int,
        *,
        vocab_size: int | None = None,
    ) -> None:
        if packing.room < 2:
            raise ConfigError(
                f"data.seq_length must leave room for at least 2 tokens of text; it leaves {packing.room}; use 128"
            )
        self.tokenizer, self.seed = tokenizer, seed
        self._packing, self._vocab_size = packing, vocab_size
        self._data = dataset if isinstance(dataset, IndexedDataset) else IndexedDataset(dataset)
        self._data.require_token_ids()
        require_text(self._data)
        self._starts, self._ends, documents = _sentences(self._data)
        lengths, longest = self._ends - self._starts, packing.longest
        if packing.long_sentences == "cut":
            if num_long := int((lengths > longest).sum()):
                cut = f"{num_long:,} of {counted(len(lengths), 'sentence')}"
                self._log("cut %s, those of more than %s", cut, counted(longest, "token"))
            self._starts, self._ends, documents = _cut(self._starts, self._ends, documents, longest)
            lengths = self._ends - self._starts
        self._handle_long_sentences(lengths, documents)
        self._packed = pack_sentences(
            lengths,
            documents,
            room=packing.room,
            min_sentences=packing.min_sentences,
            short_sequence_probability=packing.short_sequence_probability,
            seed=seed,
        )
        self.num_samples = len(self._packed)
        if not self.num_samples:
            raise DataError(
                f"{self._data.prefix} must have documents of {packing.min_sentences} or more sentences, each of at "
                f"most {longest} tokens; it has none; prepare more text, or increase data.seq_length"
            )

    @property
    def samples_per_epoch(self) -> Fraction:
        """``num_samples``, as the protocol of endless samples names it."""
        return Fraction(self.num_samples)

    def __getitem__(self, index: int) -> Sample:
        """Sample ``index``, from 0 on. Raises IndexError below 0."""
        if index < 0:
            raise IndexError(f"samples are numbered from 0; got {index}")
        epoch, place = divmod(index, self.num_samples)
        visited = KeyedPermutation(self.num_samples, self.seed, f"samples-{epoch}")(place)
        return self.sample(visited, Draws(self.seed, _DRAWS, index), index)

    def sample(self, packed: int, draws: Draws, index: int) -> Sample:
        """The sample of pack number ``packed`` in text order; error messages call it sample ``index``."""
        sentences: list[Tokens] = []
        for sentence in range(int(self._packed.firsts[packed]), int(self._packed.ends[packed])):
            start = int(self._starts[sentence])
            piece = self._data.tokens[start : int(self._ends[sentence])]
            check_sample(self._data, index, start, piece, self._vocab_size)
            sentences.append(piece.astype(np.int64))
        return self._sample(sentences, int(self._packed.targets[packed]), draws)

    def identity(self) -> dict[str, Any]:
        """The fingerprint of the text, the SHA-256 of the tokenizer file, and how it is packed."""
        return {
            "text": fingerprint(self._data.tokens, self._data.sequence_starts()),
            "tokenizer": self.tokenizer.sha256,
            "samples": f"{self.num_samples} of {self._packing.room} tokens, {self._packing}",
        }

    @abstractmethod
    def _sample(self, sentences: Sequence[Tokens], target: int, draws: Draws) -> Sample:
        """Builds the sample of ``sentences``, with at most ``target`` text tokens."""

    def _handle_long_sentences(self, lengths: Tokens, documents: Tokens) -> None:
        """Raises DataError for sentences that are too long, or logs how much text is skipped because of them."""
        longest = self._packing.longest
        is_long = lengths > longest
        if not is_long.any():
            return
        of_document = np.diff(np.concatenate(([0], np.cumsum(is_long)))[documents]) > 0
        num_tokens = np.diff(np.concatenate(([0], np.cumsum(lengths)))[documents])
        first = int(np.argmax(is_long))
        left_out = (
            f"{int(of_document.sum()):,} of {counted(len(of_document), 'document')}, "
            f"{num_tokens[of_document].sum() / num_tokens.sum():.1%} of the tokens"
        )
        if self._packing.long_sentences == "refuse":
            document = int(np.searchsorted(documents, first, side="right")) - 1
            raise DataError(
                f"sentences of {self._data.prefix} must have at most {longest} tokens to fit in a sample; sentence "
                f"{first - int(documents[document])} of document {document} has {lengths[first]}; increase "
                f"data.seq_length, split such sentences with data.masking.long_sentences=cut, or skip such documents "
                f"({left_out}) with data.masking.long_sentences=skip"
            )
        self._log("skipped documents with a sentence of more than %s: %s", counted(longest, "token"), left_out)

    def _log(self, message: str, *values: object) -> None:
        """Logs what has been done to the text, once for all ranks."""
        if os.environ.get("RANK", "0") == "0":
            log.warning(f"%s: {message}", self._data.prefix, *values)


class HeldOutSamples(Generic[Sample]):
    """Every sample of an epoch of ``dataset`` once, in text order.

    What it draws depends on the seed of ``dataset`` only, so with a fixed seed there it is the same in every run.
    """

    def __init__(self, dataset: SentenceDataset[Sample]) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return self._dataset.num_samples

    def __getitem__(self, index: int) -> Sample:
        """Sample ``index``. Raises IndexError outside [0, len)."""
        if not 0 <= index < len(self):
            raise IndexError(f"samples are numbered 0 to {len(self) - 1}; got {index}")
        return self._dataset.sample(index, Draws(self._dataset.seed, f"held-out {_DRAWS}", index), index)


def _sentences(dataset: IndexedDataset) -> tuple[Tokens, Tokens, Tokens]:
    """Start and end of each non-empty sentence in the tokens, and the index of each document's first sentence."""
    bounds = dataset.sequence_starts()
    if len(dataset) <= np.count_nonzero(np.diff(dataset.document_indices)):
        raise DataError(
            f"{dataset.prefix} must be split into sentences; it has one sequence for each document "
            f"({dataset.num_documents:,}); prepare the text again with: megalith data prepare FILES... --out "
            "PREFIX --tokenizer PATH --split-sentences"
        )
    starts, ends = bounds[:-1], bounds[1:].copy()
    if dataset.sidecar is not None and dataset.sidecar.eod is not None:
        # the last token of a document is eod, which samples do not contain
        documents = dataset.document_indices
        ends[documents[1:][np.diff(documents) > 0] - 1] -= 1
    has_text = ends > starts
    first_of_document = np.concatenate(([0], np.cumsum(has_text)))[dataset.document_indices]
    return starts[has_text], ends[has_text], first_of_document


def _cut(starts: Tokens, ends: Tokens, documents: Tokens, room: int) -> tuple[Tokens, Tokens, Tokens]:
    """The result of ``_sentences`` with sentences longer than ``room`` tokens split; the last piece may be shorter."""
    num_pieces = -(-(ends - starts) // room)
    first_piece = np.concatenate(([0], np.cumsum(num_pieces)))
    of_sentence = np.repeat(np.arange(len(starts)), num_pieces)
    begins = starts[of_sentence] + room * (np.arange(len(of_sentence)) - first_piece[of_sentence])
    return begins, np.minimum(begins + room, ends[of_sentence]), first_piece[documents]
