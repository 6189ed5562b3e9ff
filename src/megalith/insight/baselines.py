"""Baselines for a held-out loss: a unigram and an interpolated bigram model of the same tokens.

    p(w)   = (c(w) + 1) / (N + V)
    p(w|v) = weight c(v,w) / c(v) + (1 - weight) p(w),   and p(w) if v was never seen

Jelinek and Mercer 1980; Chen and Goodman 1998 ("An empirical study of smoothing techniques for language modeling",
section 2.3). V is the vocabulary size, N the number of tokens counted. The weight is fitted by expectation maximization
on one of every twenty blocks of tokens, with counts from the other nineteen; then the counts are updated with that
block. Adding one keeps every probability above zero.

Documents form one stream, as for the model: the first token of a document is predicted from the last token of the
previous one, and only the very first token is not predicted.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megalith.errors import DataError

__all__ = [
    "BaselineLosses",
    "InterpolatedBigram",
    "PairCounts",
    "TokenSequences",
    "baseline_losses",
    "fitted_bigram",
]

Tokens = NDArray[np.int64]
Probabilities = NDArray[np.float64]

_CHUNK = 1 << 20  # tokens in memory at once
_BLOCK = 1 << 14  # consecutive tokens to fit on; long, so that they differ from the text that was counted
_ONE_IN = 20  # blocks
_MOST_FITTED = 1 << 20  # tokens, regardless of the size of the data


class TokenSequences(Protocol):
    """The part of the ``IndexedDataset`` interface that is used here."""

    @property
    def sequence_lengths(self) -> NDArray[Any]: ...

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray[Any]: ...


@dataclass(frozen=True)
class BaselineLosses:
    """Losses in nats per token, over all held-out tokens except the first."""

    unigram: float
    bigram: float
    num_tokens: int
    bigram_weight: float


@dataclass(frozen=True)
class PairCounts:
    """Counts of consecutive token pairs; memory grows only with the number of distinct pairs."""

    vocab_size: int
    counts: NDArray[np.int64]  # [V], as the second token of a pair
    preceding: NDArray[np.int64]  # [V], as the first token of a pair
    pairs: NDArray[np.int64]  # distinct pairs (v, w) as v V + w, sorted
    pair_counts: NDArray[np.int64]

    @classmethod
    def of(cls, previous: Tokens, tokens: Tokens, vocab_size: int) -> "PairCounts":
        """Counts of the pairs (``previous[i]``, ``tokens[i]``), both [T]."""
        pairs, pair_counts = np.unique(previous * vocab_size + tokens, return_counts=True)
        counts, preceding = (np.bincount(side, minlength=vocab_size) for side in (tokens, previous))
        return cls(vocab_size, counts, preceding, pairs, pair_counts)

    def __add__(self, other: "PairCounts") -> "PairCounts":
        pairs, places = np.unique(np.concatenate([self.pairs, other.pairs]), return_inverse=True)
        pair_counts = np.zeros(len(pairs), np.int64)
        np.add.at(pair_counts, places, np.concatenate([self.pair_counts, other.pair_counts]))
        counts, preceding = self.counts + other.counts, self.preceding + other.preceding
        return PairCounts(self.vocab_size, counts, preceding, pairs, pair_counts)

    def __getitem__(self, keys: Tokens) -> NDArray[np.int64]:
        """The count of each of ``keys`` v V + w [T]; zero if the pair was never seen."""
        found = np.searchsorted(self.pairs, keys)
        # a sentinel after the last pair, for keys larger than all pairs
        return np.where(np.append(self.pairs, -1)[found] == keys, np.append(self.pair_counts, 0)[found], 0)


@dataclass(frozen=True)
class InterpolatedBigram:
    """Computes the probabilities in the module docstring."""

    counts: PairCounts
    weight: float = 0.5

    def unigram(self, tokens: Tokens) -> Probabilities:
        """p(w) of each of ``tokens`` [T]."""
        counts = self.counts.counts
        return np.asarray((counts[tokens] + 1.0) / (counts.sum() + self.counts.vocab_size))

    def bigram(self, previous: Tokens, tokens: Tokens) -> Probabilities:
        """p(w|v) of each pair [T]."""
        unigram, together, known = self._parts(previous, tokens)
        return np.where(known, self.weight * together + (1 - self.weight) * unigram, unigram)

    def fitted(self, previous: Tokens, tokens: Tokens) -> "InterpolatedBigram":
        """This model with the maximum-likelihood weight for these pairs [T], which must not be in its counts."""
        unigram, together, known = self._parts(previous, tokens)
        unigram, together = unigram[known], together[known]
        weight = self.weight
        for _ in range(200 if known.any() else 0):
            # posterior probability that the bigram generated each token; the mean is the new weight
            share = float(np.mean(weight * together / (weight * together + (1 - weight) * unigram)))
            change, weight = abs(share - weight), share
            if change < 1e-7:
                break
        return replace(self, weight=weight)

    def _parts(self, previous: Tokens, tokens: Tokens) -> tuple[Probabilities, Probabilities, NDArray[np.bool_]]:
        """p(w), c(v,w) / c(v), and whether v was ever seen; each [T]."""
        preceding = self.counts.preceding[previous]
        together = self.counts[previous * self.counts.vocab_size + tokens] / np.maximum(preceding, 1)
        return self.unigram(tokens), together, preceding > 0


def baseline_losses(train: TokenSequences, held_out: TokenSequences, vocab_size: int) -> BaselineLosses:
    """The losses on ``held_out`` of both baselines, counted on ``train``.

    Reads each once, a million tokens at a time. Raises DataError for too few tokens, or one outside the vocabulary.
    """
    model = fitted_bigram(train, vocab_size)
    unigram = bigram = 0.0
    num_tokens = 0
    for previous, tokens in _pairs(held_out, vocab_size):
        unigram -= float(np.log(model.unigram(tokens)).sum())
        bigram -= float(np.log(model.bigram(previous, tokens)).sum())
        num_tokens += len(tokens)
    if num_tokens == 0:
        raise DataError("the held-out data must have at least 2 tokens, an input and a target; hold out more text")
    return BaselineLosses(unigram / num_tokens, bigram / num_tokens, num_tokens, model.weight)


def fitted_bigram(train: TokenSequences, vocab_size: int) -> InterpolatedBigram:
    """The bigram model of ``train``, with the weight fitted on parts of it. Raises DataError as ``baseline_losses``."""
    num_tokens = int(np.sum(train.sequence_lengths))
    period = max(_ONE_IN, -(-num_tokens // _MOST_FITTED))
    block = min(_BLOCK, (num_tokens - 1) // period)
    if block < 1:
        raise DataError(f"the bigram baseline needs more than {period} tokens of training data; got {num_tokens}")
    none = np.zeros(0, np.int64)
    counted = PairCounts.of(none, none, vocab_size)
    kept: list[tuple[Tokens, Tokens]] = []
    position = 0
    for previous, tokens in _pairs(train, vocab_size):
        blocks = (position + np.arange(len(tokens))) // block
        position += len(tokens)
        keep = blocks % period == period - 1
        counted += PairCounts.of(previous[~keep], tokens[~keep], vocab_size)
        kept.append((previous[keep], tokens[keep]))
    previous, tokens = (np.concatenate(side) for side in zip(*kept, strict=True))
    fitted = InterpolatedBigram(counted).fitted(previous, tokens)
    return replace(fitted, counts=counted + PairCounts.of(previous, tokens, vocab_size))


def _pairs(source: TokenSequences, vocab_size: int) -> Iterator[tuple[Tokens, Tokens]]:
    """Yields (previous tokens, tokens) of the whole stream, in chunks of about a million pairs."""
    waiting: list[NDArray[Any]] = []
    size = 0
    for index, length in enumerate(source.sequence_lengths.tolist()):
        for offset in range(0, length, _CHUNK):
            waiting.append(source.get(index, offset, min(_CHUNK, length - offset)))
            size += len(waiting[-1])
            if size > _CHUNK:
                stream = _checked(waiting, vocab_size)
                yield stream[:-1], stream[1:]
                waiting, size = [stream[-1:]], 1
    if size > 1:
        stream = _checked(waiting, vocab_size)
        yield stream[:-1], stream[1:]


def _checked(pieces: list[NDArray[Any]], vocab_size: int) -> Tokens:
    tokens: Tokens = np.concatenate(pieces).astype(np.int64)
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        wrong = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
        raise DataError(
            f"token ids must be at least 0 and below the vocabulary size ({vocab_size}); got {wrong}; "
            "give the vocabulary size of the tokenizer that prepared this data"
        )
    return tokens
