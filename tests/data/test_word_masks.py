"""Which words are masked: runs of whole words, up to the given fraction, anywhere, within the caller's limits."""

import numpy as np
import pytest

from megalith.data.word_masks import SpanLimits, WordMasking, ngram_distribution
from megalith.numerics.draws import Draws

BERT, T5 = WordMasking(0.15, 3, False, True), WordMasking(0.15, 10, True, True)


def spans_of(masking, T, index, **how):
    """The spans for ``T`` tokens, each of them a word."""
    every = np.ones(T, np.bool_)
    return masking.spans(every, every, T, Draws(1, "m", index), **how)


def test_masked_spans_are_whole_words_within_the_share_and_do_not_overlap():
    random = np.random.default_rng(1)
    for index in range(200):
        T = int(random.integers(3, 60))
        starts, can_mask = random.random(T) < 0.6, random.random(T) < 0.9
        starts[0] = True
        spans = BERT.spans(starts, can_mask, 60, Draws(1, "m", index))
        times = np.zeros(T, int)
        for first, end in spans:
            times[first:end] += 1
            assert can_mask[first:end].all()
            assert starts[first] or not can_mask[first - 1]
            assert end == T or starts[end] or not can_mask[end]
        assert times.max() <= 1
        assert times.sum() <= max(1, round(T * 0.15))


@pytest.mark.parametrize("masking", [BERT, T5], ids=["bert", "t5"])
@pytest.mark.parametrize("T", [7, 60, 511])
def test_of_words_of_a_token_each_the_whole_share_is_masked_anywhere(masking, T):
    counts = np.zeros(T, int)
    for index in range(40 + 28_000 // T):
        spans = spans_of(masking, T, index)
        assert sum(end - first for first, end in spans) == int(min(0.15 * T, max(1, round(0.15 * T))))
        for first, end in spans:
            counts[first:end] += 1
    thirds = [part.mean() / counts.mean() for part in np.array_split(counts, 3)]
    assert thirds == pytest.approx([1.0] * 3, abs=0.15)  # fewer runs contain the ends


@pytest.mark.parametrize(("max_ngram", "geometric"), [(3, False), (10, True)], ids=["bert", "t5"])
def test_runs_of_words_have_the_lengths_of_the_distribution(max_ngram, geometric):
    n = np.arange(1, max_ngram + 1)
    wanted = 0.2 * 0.8 ** (n - 1) if geometric else (1 / n) / (1 / n).sum()
    if geometric:
        wanted[-1] = 1 - wanted[:-1].sum()
    np.testing.assert_allclose(ngram_distribution(max_ngram, geometric), wanted, rtol=1e-12)
    lengths = WordMasking(0.15, max_ngram, geometric, True).run_lengths(20_000, Draws(0, "x", 0))
    assert_distributed(lengths, wanted)


@pytest.mark.parametrize("masking", [BERT, T5], ids=["bert", "t5"])
def test_the_first_run_of_a_long_sample_is_as_long_as_its_word_has_drawn(masking):
    # a single span touches no other, and the share of 4,000 tokens truncates none
    lengths = np.array([end - first for i in range(2000) for first, end in first_run(masking, 4000, i)])
    wanted = ngram_distribution(masking.max_ngram, masking.geometric)
    assert_distributed(lengths, wanted)


def first_run(masking, T, index):
    return spans_of(masking, T, index, limits=SpanLimits(spans=1))


def assert_distributed(lengths, wanted):
    counts = np.bincount(lengths, minlength=len(wanted) + 1)[1:]
    expected = len(lengths) * wanted
    chi_square = ((counts - expected) ** 2 / expected).sum()
    degrees = len(wanted) - 1
    assert chi_square < degrees + 6 * np.sqrt(2 * degrees)


def test_limits_end_masking_and_change_nothing_where_they_are_not_reached():
    for index in range(100):
        free = spans_of(T5, 200, index)
        masked = sum(end - first for first, end in free)
        assert spans_of(T5, 200, index, limits=SpanLimits(len(free), masked + len(free))) == free
        few = spans_of(T5, 200, index, limits=SpanLimits(spans=2))
        assert len(few) == min(2, len(free))
        short = spans_of(T5, 200, index, limits=SpanLimits(together=9))
        assert 2 <= sum(end - first + 1 for first, end in short) <= 9
