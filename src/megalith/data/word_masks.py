"""Chooses the tokens of a sample to mask: runs of whole words at random positions, up to a share of the sample.

Words are visited in random order; each begins a run of n words, where P(n) is proportional to 1 / n for n <= max_ngram
(Megatron's BERT), or geometric with p = 0.2 and clipped to max_ngram (Megatron's T5; SpanBERT, arXiv:1907.10529,
section 3.1, redraws longer runs instead). A run that would exceed the sample's share, or its segment, is shortened
(Megatron lets runs extend over [SEP]); one that overlaps a masked word is dropped. The share is
min(probability * target, max(1, round(probability * tokens))), so nothing is masked in a sample whose target length is
less than 1 / probability tokens.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalith.numerics.draws import Draws

__all__ = ["SpanLimits", "WordMasking", "ngram_distribution"]

_GEOMETRIC = 0.2


def ngram_distribution(max_ngram: int, geometric: bool) -> NDArray[np.float64]:
    """Probabilities of runs of n = 1 ... ``max_ngram`` words, float64 [max_ngram]."""
    n = np.arange(1, max_ngram + 1)
    weights = np.asarray(_GEOMETRIC * (1 - _GEOMETRIC) ** (n - 1.0) if geometric else 1 / n, dtype=np.float64)
    if geometric:
        weights[-1] = (1 - _GEOMETRIC) ** (max_ngram - 1.0)  # the tail P(n >= max_ngram)
    return np.asarray(weights / weights.sum(), dtype=np.float64)


class SpanLimits(NamedTuple):
    """Limits in addition to the share: the number of ``spans``, and that of spans plus masked tokens ``together``."""

    spans: float = math.inf
    together: float = math.inf


_NO_LIMITS = SpanLimits()


@dataclass(frozen=True)
class WordMasking:
    """Chooses tokens to mask, as the module docstring says. If ``whole_words`` is False, every token is a word."""

    probability: float
    max_ngram: int
    geometric: bool
    whole_words: bool

    def spans(
        self,
        word_starts: NDArray[np.bool_],
        can_mask: NDArray[np.bool_],
        target: int,
        draws: Draws,
        limits: SpanLimits = _NO_LIMITS,
    ) -> list[tuple[int, int]]:
        """Returns non-overlapping runs [first, end) of tokens to mask, in text order.

        Args:
            word_starts: [T], whether a token begins a word.
            can_mask: [T]; runs do not extend over tokens that cannot be masked, such as separators.
            target: target length of the sample, in tokens.
        """
        begins = (word_starts if self.whole_words else np.ones_like(word_starts)) & can_mask
        begins[1:] |= can_mask[1:] & ~can_mask[:-1]
        begins[:1] = can_mask[:1]
        starts = np.flatnonzero(begins)
        blocked = np.append(np.flatnonzero(~can_mask), len(can_mask))
        segment_ends = blocked[np.searchsorted(blocked, starts)]  # the next token that cannot be masked
        ends = np.minimum(np.append(starts[1:], len(can_mask)), segment_ends)
        limit = min(self.probability * target, max(1, round(len(can_mask) * self.probability)))
        sizes = self.run_lengths(len(starts), draws)
        order = draws.order(len(starts))
        return _chosen(starts, ends, segment_ends, sizes[order], order, limit, limits)

    def run_lengths(self, number: int, draws: Draws) -> NDArray[np.int64]:
        """Draws the lengths in words of ``number`` runs, before any is shortened: [number]."""
        cumulative = np.cumsum(ngram_distribution(self.max_ngram, self.geometric))
        return np.searchsorted(cumulative[:-1], draws.uniform(number), side="right") + 1


def _chosen(
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    segment_ends: NDArray[np.int64],
    sizes: NDArray[np.int64],
    order: NDArray[np.int64],
    limit: float,
    limits: SpanLimits,
) -> list[tuple[int, int]]:
    """Visits words in ``order`` until ``limit`` tokens are masked, or as many as ``limits`` allow."""
    is_masked = np.zeros(len(starts), np.bool_)
    spans: list[tuple[int, int]] = []
    num_masked = 0
    for word, size in zip(order.tolist(), sizes.tolist(), strict=True):
        if num_masked >= limit or len(spans) >= limits.spans:
            break
        most = min(limit, limits.together - len(spans) - 1) - num_masked
        last = min(word + size, len(starts)) - 1
        while last > word and ends[last] > segment_ends[word]:  # beyond a separator
            last -= 1
        while last >= word and ends[last] - starts[word] > most:
            last -= 1
        if last < word or is_masked[word : last + 1].any():
            continue
        is_masked[word : last + 1] = True
        spans.append((int(starts[word]), int(ends[last])))
        num_masked += spans[-1][1] - spans[-1][0]
    return sorted(spans)
