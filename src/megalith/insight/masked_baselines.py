"""Baselines for the accuracy on masked tokens: predictions from counts, on the same tokens.

    unigram   the most frequent token
    bigram    the token that most often follows the previous one, which is taken from the original text, masked or not

Counts are those of the training data. Losses are those of the unigram and the interpolated bigram of ``baselines``.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megalith.errors import DataError
from megalith.insight.baselines import PairCounts, TokenSequences, fitted_bigram

__all__ = ["MaskedBaselines", "MaskedText", "masked_baselines"]


class MaskedText(Protocol):
    """``labels``: tokens of a text, int64 [N]; ``loss_mask``: bool [N], tokens to predict, never the first one."""

    @property
    def labels(self) -> NDArray[np.int64]: ...
    @property
    def loss_mask(self) -> NDArray[np.bool_]: ...


@dataclass(frozen=True)
class MaskedBaselines:
    """Accuracies as shares of ``num_tokens`` masked tokens, and losses in nats per token."""

    unigram_accuracy: float
    bigram_accuracy: float
    unigram_loss: float
    bigram_loss: float
    num_tokens: int


def masked_baselines(train: TokenSequences, samples: Iterable[MaskedText], vocab_size: int) -> MaskedBaselines:
    """Baselines for the masked tokens of ``samples``. Raises DataError as ``baseline_losses``, or if none is masked."""
    model = fitted_bigram(train, vocab_size)
    places = [(sample.labels, np.flatnonzero(sample.loss_mask)) for sample in samples]
    previous = np.concatenate([np.zeros(0, np.int64), *(labels[masked - 1] for labels, masked in places)])
    tokens = np.concatenate([np.zeros(0, np.int64), *(labels[masked] for labels, masked in places)])
    if not len(tokens):
        raise DataError("no token of the held-out data is masked; hold out more text")
    commonest = int(model.counts.counts.argmax())
    guesses = np.full(vocab_size, commonest)
    followed, following = _likeliest_pairs(model.counts)
    guesses[followed] = following
    return MaskedBaselines(
        float(np.mean(tokens == commonest)),
        float(np.mean(tokens == guesses[previous])),
        float(-np.log(model.unigram(tokens)).mean()),
        float(-np.log(model.bigram(previous, tokens)).mean()),
        len(tokens),
    )


def _likeliest_pairs(counts: PairCounts) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Every token that has a successor, and its most frequent successor."""
    before, after = np.divmod(counts.pairs, counts.vocab_size)
    order = np.lexsort((after, -counts.pair_counts, before))
    first = np.unique(before[order], return_index=True)[1]
    return before[order][first], after[order][first]
