"""Samples for supervised fine-tuning: whole conversations packed into rows, with a loss on what the assistant writes.

A row holds conversations one after the other (``packing.py``), and padding without a loss at its end. Of a
conversation of n tokens it holds n - 1, each with the next one as its label; the last one predicts nothing. The
documents of a row are kept apart: a conversation is computed as if it were alone.

Every epoch has the same rows. Epoch e visits them in an order keyed by (seed, e), so sample i depends only on (data, S,
settings, seed, i), not on batch size, number of ranks or length of the run.
"""

import logging
import os
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from megalith.config.data_config import LongConversations
from megalith.data.conversations import holds_conversations, learned_sequences
from megalith.data.fingerprint import fingerprint
from megalith.data.gpt_dataset import GPTSample
from megalith.data.indexed_dataset import IndexedDataset
from megalith.data.row_packing import pack_rows
from megalith.data.token_ids import check_sample
from megalith.errors import ConfigError, DataError
from megalith.numerics.permutation import KeyedPermutation
from megalith.wording import counted

__all__ = ["ChatDataset", "ChatSample", "HeldOutChats"]

log = logging.getLogger(__name__)

_MUCH_PADDING = 0.2  # share of the tokens in the rows

Numbers = NDArray[np.int64]


class ChatSample(GPTSample):
    """One row of conversations; the document after the last one is padding."""

    keeps_documents_apart: ClassVar[bool] = True


class ChatDataset:
    """Rows of conversations without end: every index from 0 on is valid.

    Conversations in which nothing is learned are left out.

    Args:
        dataset: the dataset or its prefix, written by ``megalith data chat``.
        seq_length: S.
        seed: seed of the packing and of the order.
        long_conversations: what to do with those that do not fit in a row: raise an error, cut off their end, or leave
            them out.
        vocab_size: vocabulary size of the model that reads the samples; None: unknown.

    Attributes:
        num_samples: number of rows per epoch.

    Raises:
        ConfigError: ``seq_length`` is below 1.
        DataError: the files cannot be read, do not hold conversations, or one is too long, or there is nothing to
            learn; or, when a sample is read, it has a token id that is not below ``vocab_size``.
    """

    def __init__(
        self,
        dataset: str | Path | IndexedDataset,
        seq_length: int,
        seed: int,
        *,
        long_conversations: LongConversations = "refuse",
        vocab_size: int | None = None,
    ) -> None:
        self.seq_length, self.seed = seq_length, seed
        self._vocab_size, self._long = vocab_size, long_conversations
        self._treated = ""  # what was done with long conversations, if there are any
        self._data = _open(dataset, seq_length)
        self._starts = self._data.document_starts()
        self._is_learned = learned_sequences(self._data)
        chosen, lengths = self._chosen()
        order = KeyedPermutation(len(chosen), seed, "packing")(np.arange(len(chosen)))
        items, self._row_starts = pack_rows(lengths, seq_length, order)
        self._documents = chosen[items]
        self.num_samples = len(self._row_starts) - 1
        self._tell_of_padding(lengths)

    @property
    def samples_per_epoch(self) -> Fraction:
        """Number of rows."""
        return Fraction(self.num_samples)

    def __getitem__(self, index: int) -> ChatSample:
        """Sample ``index``, from 0 on. Raises IndexError below 0."""
        if index < 0:
            raise IndexError(f"samples are numbered from 0; got {index}")
        epoch, place = divmod(index, self.num_samples)
        return self.row(KeyedPermutation(self.num_samples, self.seed, f"rows-{epoch}")(place), index)

    def row(self, number: int, index: int) -> ChatSample:
        """Row ``number`` of an epoch; error messages call it sample ``index``."""
        S = self.seq_length
        tokens, labels = np.zeros(S, np.int64), np.zeros(S, np.int64)
        loss_mask, documents = np.zeros(S, np.bool_), np.zeros(S, np.int32)
        start = 0
        for document in self._documents[self._row_starts[number] : self._row_starts[number + 1]].tolist():
            first = int(self._starts[document])
            piece = self._data.tokens[first : min(first + S + 1, int(self._starts[document + 1]))]
            check_sample(self._data, index, first, piece, self._vocab_size)
            sequences = slice(*self._data.document_indices[document : document + 2])
            learned = np.repeat(self._is_learned[sequences], self._data.sequence_lengths[sequences])[: len(piece)]
            own = slice(start, start + len(piece) - 1)
            tokens[own], labels[own], loss_mask[own] = piece[:-1], piece[1:], learned[1:]
            start = own.stop
            documents[start:] += 1  # of the next one, or of the padding
        return ChatSample(tokens, labels, loss_mask, documents, start)

    def identity(self) -> dict[str, Any]:
        """The fingerprint of text and roles, the SHA-256 of the tokenizer file if it is recorded, and the packing."""
        sidecar = self._data.sidecar
        return {
            "text": fingerprint(self._data.tokens, self._data.sequence_starts()),
            "tokenizer": None if sidecar is None else sidecar.tokenizer_sha256,
            "samples": f"{self.num_samples} rows of {self.seq_length} tokens{self._treated}",
        }

    def _chosen(self) -> tuple[Numbers, Numbers]:
        """The conversations to pack, and how many tokens of a row each takes."""
        lengths = np.diff(self._starts)
        is_long = lengths > self.seq_length + 1
        is_used = np.ones(len(lengths), np.bool_)
        if is_long.any():
            self._handle(is_long, lengths)
            if self._long == "skip":
                is_used = ~is_long
        lengths = np.minimum(lengths, self.seq_length + 1)
        firsts = self._starts[:-1] + np.minimum(lengths, 1)  # the first token is no label
        is_used &= self._num_learned_before(self._starts[:-1] + lengths) > self._num_learned_before(firsts)
        if not is_used.any():
            raise DataError(
                f"{self._data.prefix} must have conversations with tokens to learn in the first {self.seq_length + 1}; "
                "it has none; prepare others, or increase data.seq_length"
            )
        chosen = np.flatnonzero(is_used)
        return chosen, lengths[chosen] - 1

    def _num_learned_before(self, positions: Numbers) -> Numbers:
        """How many of the first tokens of the file, up to each of ``positions``, are learned."""
        borders = self._data.sequence_starts()
        is_learned = np.append(self._is_learned, False)
        before = np.concatenate(([0], np.cumsum(np.where(self._is_learned, np.diff(borders), 0))))
        sequences = np.searchsorted(borders, positions, side="right") - 1
        found: Numbers = before[sequences] + is_learned[sequences] * (positions - borders[sequences])
        return found

    def _handle(self, is_long: NDArray[np.bool_], lengths: Numbers) -> None:
        """Raises DataError for conversations that are too long, or logs what is done with them."""
        S, longest = self.seq_length, int(np.argmax(lengths))
        share = f"{int(is_long.sum()):,} of {counted(len(lengths), 'conversation')}"
        if self._long == "refuse":
            raise DataError(
                f"conversations of {self._data.prefix} must have at most {S + 1} tokens, one more than data.seq_length "
                f"({S}); longer: {share}; the longest, document {longest}, has {lengths[longest]}; use "
                f"data.seq_length={lengths[longest] - 1}, cut off their end with data.long_conversations=cut, or leave "
                "them out with data.long_conversations=skip"
            )
        self._treated = f", long conversations: {self._long}"
        done = "left out" if self._long == "skip" else "cut off the end of"
        self._log(logging.WARNING, f"{done} {share}, those of more than {counted(S + 1, 'token')}")

    def _tell_of_padding(self, lengths: Numbers) -> None:
        """Logs how much of the rows is padding, and what would be less if it is much."""
        S, longest = self.seq_length, int(lengths.max())
        padding = 1 - lengths.sum() / (self.num_samples * S)
        told = (
            f"packed {counted(len(lengths), 'conversation')} into {counted(self.num_samples, 'row')} of "
            f"{counted(S, 'token')}; {padding:.1%} is padding"
        )
        if padding <= _MUCH_PADDING or longest == S:
            self._log(logging.INFO, told)
        else:
            self._log(logging.WARNING, f"{told}; data.seq_length={longest} has room for the longest")

    def _log(self, level: int, message: str) -> None:
        """Logs what has been done to the data, once for all ranks."""
        if os.environ.get("RANK", "0") == "0":
            log.log(level, "%s: %s", self._data.prefix, message)


class HeldOutChats:
    """Every row of ``dataset`` once, in the order of packing; with a fixed seed there, the same in every run."""

    def __init__(self, dataset: ChatDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return self._dataset.num_samples

    def __getitem__(self, index: int) -> ChatSample:
        """Sample ``index``. Raises IndexError outside [0, len)."""
        if not 0 <= index < len(self):
            raise IndexError(f"samples are numbered 0 to {len(self) - 1}; got {index}")
        return self._dataset.row(index, index)


def _open(dataset: str | Path | IndexedDataset, seq_length: int) -> IndexedDataset:
    if seq_length < 1:
        raise ConfigError(f"data.seq_length must be at least 1; got {seq_length}; use 1024")
    found = dataset if isinstance(dataset, IndexedDataset) else IndexedDataset(dataset)
    found.require_token_ids()
    if not holds_conversations(found):
        raise DataError(
            f"{found.prefix} must hold conversations; {found.prefix}.json does not say so; prepare them with: megalith "
            "data chat FILES... --out PREFIX --tokenizer PATH"
        )
    return found
