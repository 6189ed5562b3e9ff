"""Samples of pairs: a query, its positive passage and n hard negatives, packed into one row of S tokens.

    [CLS] query [SEP] [CLS] positive [SEP] [CLS] negative 1 [SEP] ... [CLS] negative n [SEP] [PAD] ...

Epoch e visits the pairs in an order keyed by (seed, e), and the negatives of sample i are drawn from (seed, i), so it
depends only on (data, tokenizer, n, seed, i).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalith.data.conversations import holds_pairs
from megalith.data.fingerprint import fingerprint
from megalith.data.indexed_dataset import IndexedDataset
from megalith.data.special_tokens import bert_tokens
from megalith.data.token_ids import check_sample
from megalith.data.tokenizer import Tokenizer
from megalith.errors import ConfigError, DataError
from megalith.numerics.draws import Draws
from megalith.numerics.permutation import KeyedPermutation

__all__ = ["PairBatch", "PairDataset", "PairSample", "PairTexts", "num_negatives_of", "row_lengths", "stack_pairs"]

Numbers = NDArray[np.int64]

_NUM_AROUND = 2  # special tokens around a text
_BEFORE_NEGATIVES = 2  # query and positive


@dataclass(frozen=True)
class PairSample:
    """``texts``: query, positive and n negatives, int64 [T] each, with their special tokens."""

    texts: tuple[Numbers, ...]


@dataclass(frozen=True)
class PairBatch:
    """B rows for an encoder, each of D = 2 + n texts: whole rows, or this rank's columns of them.

    Attributes:
        tokens: int64 [B, S].
        lengths: int64 [B, D], the number of tokens of each text in its whole row; the first begins in column 0, each
            other one where the text before it ends.
        text_ids: int64 [B, D], equal for equal texts, in every process.
        counted: bool [B], whether the row counts in the loss.
        row_ids: int64 [B], index of each row in the step's global batch.
        positions: int64 [S], index of each column in its row.
    """

    tokens: Numbers
    lengths: Numbers
    text_ids: Numbers
    counted: NDArray[np.bool_]
    row_ids: Numbers
    positions: Numbers

    def columns(self, positions: Numbers) -> "PairBatch":
        """Selects the columns at ``positions`` of whole rows; what describes texts stays that of whole rows."""
        return replace(self, tokens=self.tokens[:, positions], positions=positions)

    def counting(self, counted: Sequence[bool]) -> "PairBatch":
        """The same rows, of which those that are not ``counted`` do not count."""
        return replace(self, counted=self.counted & np.array(counted, np.bool_))


def stack_pairs(samples: Sequence[PairSample], row_ids: Sequence[int], seq_length: int, padding: int) -> PairBatch:
    """Stacks samples with the same number of texts into a batch, one per row, padded with the token ``padding``."""
    tokens = np.full((len(samples), seq_length), padding, np.int64)
    for row, sample in zip(tokens, samples, strict=True):
        packed = np.concatenate(sample.texts)
        row[: len(packed)] = packed
    return PairBatch(
        tokens=tokens,
        lengths=np.array([[len(text) for text in sample.texts] for sample in samples], np.int64),
        text_ids=np.array([[_text_id(text) for text in sample.texts] for sample in samples], np.int64),
        counted=np.ones(len(samples), np.bool_),
        row_ids=np.array(row_ids, np.int64),
        positions=np.arange(seq_length),
    )


def num_negatives_of(dataset: IndexedDataset) -> Numbers:
    """The number of negatives of each pair, int64 [N]. Raises DataError if ``dataset`` does not hold pairs."""
    if not holds_pairs(dataset):
        raise DataError(
            f"{dataset.prefix} must hold pairs of a query and a passage; {dataset.prefix}.json does not say so; "
            "prepare them with: megalith data pairs FILES... --out PREFIX --tokenizer PATH"
        )
    found = np.diff(dataset.document_indices) - _BEFORE_NEGATIVES
    if not len(found) or found.min() < 0:
        raise DataError(
            f"{dataset.prefix} must have pairs, each of a query and a passage at least; it has "
            + (f"{found.min() + _BEFORE_NEGATIVES} texts in pair {found.argmin()}" if len(found) else "none")
            + "; prepare it again with: megalith data pairs"
        )
    return found


def row_lengths(dataset: IndexedDataset, num_negatives: int) -> Numbers:
    """The most tokens of a row of each pair, int64 [N]: with its longest negatives, special tokens included.

    ``num_negatives`` is at most the number that every pair has.
    """
    firsts, lengths = dataset.document_indices, dataset.sequence_lengths.astype(np.int64)
    counts = np.diff(firsts)
    number = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(lengths)) - firsts[number]  # in the pair
    is_negative = place >= _BEFORE_NEGATIVES
    total = lengths[firsts[:-1]] + lengths[firsts[:-1] + 1]  # [N]
    # sorting pair * 2^32 + 2^31 - length sorts the negatives of each pair by length, the longest first; lengths < 2^31
    keys = np.sort((number[is_negative] << 32) + (1 << 31) - lengths[is_negative])
    ends = np.cumsum(counts - _BEFORE_NEGATIVES)
    rank = np.arange(len(keys)) - (ends - counts + _BEFORE_NEGATIVES)[keys >> 32]
    longest = keys[rank < num_negatives]
    np.add.at(total, longest >> 32, (1 << 31) - (longest & 0xFFFFFFFF))
    return total + _NUM_AROUND * (_BEFORE_NEGATIVES + num_negatives)


class PairTexts:
    """The pairs of a dataset once, in file order, each with its first n negatives.

    Args:
        dataset: prefix of a dataset written by ``data.pairs.prepare``.
        tokenizer: the tokenizer that encoded the dataset.
        seq_length: S, maximum number of tokens in a row, special tokens included.
        num_negatives: n; by default the smallest number that a pair has.
        vocab_size: vocabulary size of the model that reads the samples; None: unknown.
        num_positions: of the model's table of positions, which restart in every text; None: without a table.

    Attributes:
        num_negatives: n.

    Raises:
        ConfigError: ``num_negatives`` is below 0.
        DataError: the files cannot be read or do not hold pairs, a pair has fewer than n negatives, or does not fit in
            a row with its n longest ones, or has a text with more tokens than positions; the tokenizer lacks one of
            BERT's special tokens; or, when a sample is read, it has a token id that is not below ``vocab_size``.
    """

    def __init__(
        self,
        dataset: str | Path,
        tokenizer: Tokenizer,
        seq_length: int,
        *,
        num_negatives: int | None = None,
        vocab_size: int | None = None,
        num_positions: int | None = None,
    ) -> None:
        self.special = bert_tokens(tokenizer)
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._data = IndexedDataset(dataset)
        self._data.require_token_ids()
        self._num_present = num_negatives_of(self._data)
        self._firsts, self._starts = self._data.document_indices, self._data.sequence_starts()
        self.num_negatives = int(self._num_present.min()) if num_negatives is None else num_negatives
        self._check_negatives()
        self._check_lengths(seq_length, num_positions)

    def __len__(self) -> int:
        return len(self._num_present)

    def __getitem__(self, index: int) -> PairSample:
        """Pair ``index`` with its first n negatives. Raises IndexError outside [0, len)."""
        if not 0 <= index < len(self):
            raise IndexError(f"pairs are numbered 0 to {len(self) - 1}; got {index}")
        return self.sample(index, range(self.num_negatives), index)

    def sample(self, pair: int, negatives: Sequence[int], index: int) -> PairSample:
        """Pair number ``pair`` with these ``negatives`` of it; error messages call it sample ``index``."""
        first = int(self._firsts[pair])
        numbers = [first, first + 1, *(first + _BEFORE_NEGATIVES + number for number in negatives)]
        return PairSample(tuple(self._text(number, index) for number in numbers))

    def num_present(self, pair: int) -> int:
        """The number of negatives of pair number ``pair``."""
        return int(self._num_present[pair])

    def identity(self) -> dict[str, Any]:
        """Fingerprints of the texts and of what pairs they form, and the SHA-256 of the tokenizer file."""
        return {
            "text": fingerprint(self._data.tokens, self._starts),
            "pairs": fingerprint(self._data.tokens, self._data.document_starts()),
            "tokenizer": self._tokenizer.sha256,
        }

    def _text(self, number: int, index: int) -> Numbers:
        first = int(self._starts[number])
        text = self._data.tokens[first : int(self._starts[number + 1])]
        check_sample(self._data, index, first, text, self._vocab_size)
        return np.concatenate(([self.special.classifier], text.astype(np.int64), [self.special.separator]))

    def _check_negatives(self) -> None:
        n, least = self.num_negatives, int(self._num_present.min())
        if n < 0:
            raise ConfigError(f"the number of negatives must be 0 or more; got {n}; use {least}")
        if n > least:
            raise DataError(
                f"pairs of {self._data.prefix} must have at least {n} negatives; pair {self._num_present.argmin()} has "
                f"{least}; use {least} negatives, or remove pairs with fewer"
            )

    def _check_lengths(self, seq_length: int, num_positions: int | None) -> None:
        lengths = row_lengths(self._data, self.num_negatives)
        if (longest := int(lengths.max())) > seq_length:
            raise DataError(
                f"pairs of {self._data.prefix} must have at most {seq_length} tokens to fit in a row "
                f"(data.seq_length), with {self.num_negatives} negatives and two special tokens around "
                f"each text; pair {lengths.argmax()} has up to {longest}; use data.seq_length={longest} or more, fewer "
                "negatives, or truncate long texts with: megalith data pairs ... --max-query-tokens N "
                "--max-passage-tokens N"
            )
        if num_positions is None:
            return
        of_texts = self._data.sequence_lengths.astype(np.int64) + _NUM_AROUND
        place = np.arange(len(of_texts)) - np.repeat(self._firsts[:-1], np.diff(self._firsts))  # in the pair
        if not self.num_negatives:
            of_texts[place >= _BEFORE_NEGATIVES] = 0
        if (longest := int(of_texts.max())) > num_positions:
            pair = int(np.searchsorted(self._firsts, of_texts.argmax(), side="right")) - 1
            most = num_positions - _NUM_AROUND
            raise DataError(
                f"texts of {self._data.prefix} must have at most {num_positions} tokens with the two special ones "
                f"around each, because the model has as many positions (model.max_position_embeddings); pair {pair} "
                f"has one of {longest}; truncate them with: megalith data pairs ... --max-query-tokens {most} "
                f"--max-passage-tokens {most}"
            )


class PairDataset:
    """``texts`` repeated without end, with drawn negatives: every index from 0 on is valid."""

    def __init__(self, texts: PairTexts, seed: int) -> None:
        self.texts, self._seed = texts, seed

    @property
    def samples_per_epoch(self) -> Fraction:
        """Number of pairs."""
        return Fraction(len(self.texts))

    def __getitem__(self, index: int) -> PairSample:
        """Sample ``index``, from 0 on. Raises IndexError below 0."""
        if index < 0:
            raise IndexError(f"samples are numbered from 0; got {index}")
        epoch, place = divmod(index, len(self.texts))
        pair = KeyedPermutation(len(self.texts), self._seed, f"pairs-{epoch}")(place)
        order = Draws(self._seed, "negatives", index).order(self.texts.num_present(pair))
        return self.texts.sample(pair, order[: self.texts.num_negatives].tolist(), index)

    def identity(self) -> dict[str, Any]:
        """The identity of the texts."""
        return self.texts.identity()


def _text_id(tokens: Numbers) -> int:
    digest = hashlib.blake2b(tokens.astype("<i8").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
