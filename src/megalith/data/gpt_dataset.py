"""Samples for causal language models: fixed-size windows of an endless token stream, computed from the sample index.

The stream concatenates epochs; in epoch e the documents are permuted with the key (seed, e). Windows begin at multiples
of S in that stream, and each sample is one window. The windows that begin in epoch e are visited in an order that is
keyed by (seed, e) as well. A window holds S tokens and the token after them, with which the next window begins, so that
no token is skipped or predicted twice in an epoch, not even at the boundary between two epochs.

Documents of a sample may be reordered (``fill_in_the_middle.py``), which makes the sample longer: it is truncated, and
the rest is not read in that epoch. In the rare case that it becomes shorter, it is padded with zeros that the loss mask
excludes.

Sample i depends only on (data, seed, S, i) and the fill-in-the-middle settings, not on batch size, number of ranks or
length of the run. The position of a run in its data is therefore a single integer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from megalith.data.conversations import require_text
from megalith.data.fill_in_the_middle import FillInTheMiddle
from megalith.data.fingerprint import fingerprint
from megalith.data.indexed_dataset import IndexedDataset
from megalith.data.token_ids import check_sample
from megalith.errors import ConfigError, DataError
from megalith.numerics.draws import Draws
from megalith.numerics.permutation import KeyedPermutation

__all__ = ["EvaluationDataset", "GPTBatch", "GPTDataset", "GPTSample", "stack_samples", "with_labels_ahead"]


@dataclass(frozen=True)
class GPTSample:
    """One window of S tokens.

    Attributes:
        tokens: int64 [S].
        labels: int64 [S], the next token at each position.
        loss_mask: bool [S], whether the label counts in the loss.
        documents: int32 [S], ordinal of the token's document within the sample, from 0.
        num_tokens: how many of them, from the first on, are not padding.
        keeps_documents_apart: whether documents do not attend to each other, and positions restart in each, whatever
            ``data.reset_attention_mask`` and ``data.reset_position_ids`` say.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    documents: NDArray[np.int32]
    num_tokens: int
    keeps_documents_apart: ClassVar[bool] = False


@dataclass(frozen=True)
class GPTBatch:
    """B samples.

    Attributes:
        tokens: int64 [B, S].
        labels, loss_mask: int64 and bool [B, S]; [1+M, B, S] with multi-token prediction.
        documents: int32 [B, S].
        num_tokens: int64 [B].
        keeps_documents_apart: bool [B].
        row_ids: int64 [B], index of each row in the step's global batch.
        positions: int64 [S], index of each column in its row. If rows are split over ranks, tokens, labels, loss_mask
            and positions hold this rank's columns; documents hold whole rows.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    documents: NDArray[np.int32]
    num_tokens: NDArray[np.int64]
    keeps_documents_apart: NDArray[np.bool_]
    row_ids: NDArray[np.int64]
    positions: NDArray[np.int64]


def stack_samples(samples: Sequence[GPTSample], row_ids: Sequence[int]) -> GPTBatch:
    """Stacks samples into a batch, one per row."""
    return GPTBatch(
        np.stack([sample.tokens for sample in samples]),
        np.stack([sample.labels for sample in samples]),
        np.stack([sample.loss_mask for sample in samples]),
        np.stack([sample.documents for sample in samples]),
        np.array([sample.num_tokens for sample in samples]),
        np.array([sample.keeps_documents_apart for sample in samples]),
        np.array(row_ids, dtype=np.int64),
        np.arange(len(samples[0].tokens)),
    )


def with_labels_ahead(batch: GPTBatch, num_ahead: int) -> GPTBatch:
    """``batch`` with labels and loss_mask [1+M, B, S]: those of each token, then those of the tokens 1, 2 ... M ahead.

    M is ``num_ahead``. A label ahead counts if it counts at its own position, and if that position is in the same
    document of the same row; labels beyond the row are 0.
    """
    labels, masks = [batch.labels], [batch.loss_mask]
    for depth in range(1, num_ahead + 1):
        labels.append(_ahead(batch.labels, depth))
        masks.append(_ahead(batch.loss_mask, depth) & (_ahead(batch.documents, depth) == batch.documents))
    return replace(batch, labels=np.stack(labels), loss_mask=np.stack(masks))


class GPTDataset:
    """Samples of an indexed dataset without end: every index from 0 on is valid. Not thread-safe.

    A document ends where the dataset says so, and after every eod token inside it if the sidecar names that token.

    Args:
        dataset: the dataset or its prefix.
        seq_length: S.
        seed: seed of the permutations of documents and windows.
        mask_eod: exclude the last token of each document from the loss, because the token after it is unrelated.
        vocab_size: vocabulary size of the model that reads the samples; None: unknown.
        fill_in_the_middle: reorders documents of a sample, drawn from (seed, index); None: no reordering.

    Raises:
        ConfigError: ``seq_length`` is below 1.
        DataError: the files cannot be read, do not hold token ids, hold fewer than two, or hold conversations
            (``chat/dataset.py``); or, when a sample is read, it has a token id that is not below ``vocab_size``.
    """

    def __init__(
        self,
        dataset: str | Path | IndexedDataset,
        seq_length: int,
        seed: int,
        *,
        mask_eod: bool = False,
        vocab_size: int | None = None,
        fill_in_the_middle: FillInTheMiddle | None = None,
    ) -> None:
        self.seq_length = seq_length
        self.mask_eod = mask_eod
        self.vocab_size = vocab_size
        self._seed = seed
        self._fill_in_the_middle = fill_in_the_middle
        self._data = _open(dataset, seq_length)
        self._eod = _eod_of(self._data)
        self._starts = self._data.document_starts()
        self._epochs: dict[int, _Epoch] = {}

    @property
    def tokens_per_epoch(self) -> int:
        """Number of tokens in the dataset."""
        return self._data.num_tokens

    @property
    def samples_per_epoch(self) -> Fraction:
        """Number of samples that read every token once."""
        return Fraction(self.tokens_per_epoch, self.seq_length)

    def identity(self) -> dict[str, Any]:
        """The fingerprint of the text, and the SHA-256 of the tokenizer file if the sidecar records it."""
        sidecar = self._data.sidecar
        return {
            "text": fingerprint(self._data.tokens, self._starts),
            "tokenizer": None if sidecar is None else sidecar.tokenizer_sha256,
        }

    def __getitem__(self, index: int) -> GPTSample:
        """Sample ``index``, from 0 on. Raises IndexError below 0."""
        if index < 0:
            raise IndexError(f"samples are numbered from 0; got {index}")
        window = self._window(index)
        stretch, documents = self._read(window * self.seq_length, self.seq_length + 1, index)
        if self._fill_in_the_middle is None:
            return _sample(stretch, documents, self._eod, self.mask_eod)
        stretch, documents = self._fill_in_the_middle(
            stretch, documents, Draws(self._seed, "fill-in-the-middle", index)
        )
        kept = slice(self.seq_length + 1)
        return _filled_up(_sample(stretch[kept], documents[kept], self._eod, self.mask_eod), self.seq_length)

    def _window(self, index: int) -> int:
        """Index in the stream of the window that is sample ``index``."""
        S, N = self.seq_length, self.tokens_per_epoch
        epoch = index * S // N  # windows are visited in the order of their epochs, so sample and window share it
        first = -(-epoch * N // S)
        end = -(-(epoch + 1) * N // S)
        visit = KeyedPermutation(end - first, self._seed, f"windows-{epoch}")
        return first + visit(index - first)

    def _read(self, position: int, length: int, sample: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Reads ``length`` tokens of the stream from ``position``, and the document number of each.

        ``sample`` is the sample index for error messages.
        """
        tokens: list[NDArray[np.int64]] = []
        documents: list[NDArray[np.int64]] = []
        while length > 0:
            epoch, offset = divmod(position, self.tokens_per_epoch)
            order = self._epoch(epoch)
            slot = int(np.searchsorted(order.ends, offset, side="right"))  # "right" skips empty documents
            end = int(self._starts[order.documents[slot] + 1])
            begin = end - (int(order.ends[slot]) - offset)
            piece = self._data.tokens[begin : min(end, begin + length)]
            check_sample(self._data, sample, begin, piece, self.vocab_size)
            tokens.append(piece.astype(np.int64))
            documents.append(np.full(len(piece), epoch * len(order.documents) + slot))
            position += len(piece)
            length -= len(piece)
        return np.concatenate(tokens), np.concatenate(documents)

    def _epoch(self, epoch: int) -> "_Epoch":
        """The document order of one epoch; two epochs are cached, because a window may span both."""
        if epoch not in self._epochs:
            while len(self._epochs) > 1:
                del self._epochs[min(self._epochs)]
            self._epochs[epoch] = _Epoch.of(np.diff(self._starts), self._seed, epoch)
        return self._epochs[epoch]


class EvaluationDataset:
    """The samples of a dataset once, in file order: every token but the first is a label exactly once.

    The last window is padded with zeros that the loss mask excludes. Arguments and errors as in GPTDataset.
    """

    def __init__(
        self,
        dataset: str | Path | IndexedDataset,
        seq_length: int,
        *,
        mask_eod: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        self.seq_length = seq_length
        self.mask_eod = mask_eod
        self.vocab_size = vocab_size
        self._data = _open(dataset, seq_length)
        self._eod = _eod_of(self._data)
        self._starts = self._data.document_starts()

    def __len__(self) -> int:
        return -(-(self._data.num_tokens - 1) // self.seq_length)

    def __getitem__(self, index: int) -> GPTSample:
        """Sample ``index``. Raises IndexError outside [0, len)."""
        if not 0 <= index < len(self):
            raise IndexError(f"samples are numbered 0 to {len(self) - 1}; got {index}")
        S = self.seq_length
        stretch = self._data.tokens[index * S : (index + 1) * S + 1].astype(np.int64)
        check_sample(self._data, index, index * S, stretch, self.vocab_size)
        documents = np.searchsorted(self._starts, np.arange(index * S, index * S + len(stretch)), side="right")
        return _filled_up(_sample(stretch, documents, self._eod, self.mask_eod), S)


@dataclass(frozen=True)
class _Epoch:
    """The documents [N] in the order of the epoch, and where each ends in the epoch's token stream."""

    documents: NDArray[np.int64]
    ends: NDArray[np.int64]

    @classmethod
    def of(cls, lengths: NDArray[np.int64], seed: int, epoch: int) -> "_Epoch":
        order = KeyedPermutation(len(lengths), seed, f"documents-{epoch}")(np.arange(len(lengths)))
        return cls(order, np.cumsum(lengths[order]))


def _open(dataset: str | Path | IndexedDataset, seq_length: int) -> IndexedDataset:
    if seq_length < 1:
        raise ConfigError(f"data.seq_length must be at least 1; got {seq_length}; use 1024")
    found = dataset if isinstance(dataset, IndexedDataset) else IndexedDataset(dataset)
    found.require_token_ids()
    require_text(found)
    if found.num_tokens < 2:
        raise DataError(
            f"{found.prefix} must contain at least two tokens, an input and a target; it has {found.num_tokens}; "
            "prepare more text"
        )
    return found


def _eod_of(dataset: IndexedDataset) -> int | None:
    return None if dataset.sidecar is None else dataset.sidecar.eod


def _ahead(values: NDArray[Any], distance: int) -> NDArray[Any]:
    """Shifts [B, S] left by ``distance``, filling with zeros."""
    return np.pad(values[:, distance:], ((0, 0), (0, distance)))


def _sample(stretch: NDArray[np.int64], documents: NDArray[np.int64], eod: int | None, mask_eod: bool) -> GPTSample:
    """The sample of S + 1 consecutive tokens; ``documents`` changes where a new document begins."""
    is_last = np.diff(documents) != 0  # [S]: the next token is in another document
    if eod is not None:
        is_last |= stretch[:-1] == eod
    loss_mask = ~is_last if mask_eod else np.ones(len(is_last), dtype=np.bool_)
    ordinals = np.concatenate(([0], np.cumsum(is_last[:-1]))).astype(np.int32)
    return GPTSample(stretch[:-1], stretch[1:], loss_mask, ordinals, len(ordinals))


def _filled_up(sample: GPTSample, length: int) -> GPTSample:
    """Pads ``sample`` to ``length`` tokens with zeros that the loss mask excludes and that join its last document."""
    missing = length - len(sample.tokens)
    if not missing:
        return sample
    return GPTSample(
        np.pad(sample.tokens, (0, missing)),
        np.pad(sample.labels, (0, missing)),
        np.pad(sample.loss_mask, (0, missing)),
        np.pad(sample.documents, (0, missing), mode="edge"),
        sample.num_tokens,
    )
