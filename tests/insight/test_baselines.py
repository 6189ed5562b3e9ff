"""Unigram and interpolated bigram: by hand, as probabilities, on a source of known entropy, in any chunks."""

import math

import numpy as np
import pytest

from megalith.errors import DataError
from megalith.insight import baselines
from megalith.insight.baselines import InterpolatedBigram, PairCounts, baseline_losses


class Documents:
    """Tokens cut into documents, with the interface of an IndexedDataset."""

    def __init__(self, *documents):
        self.documents = [np.asarray(document, np.uint16) for document in documents]
        self.sequence_lengths = np.array([len(document) for document in self.documents], np.int32)

    def get(self, index, offset=0, length=None):
        return self.documents[index][offset : None if length is None else offset + length]


TRANSITIONS = np.array([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8], [0.45, 0.5, 0.05]])


def markov_chain(count, seed):
    """Tokens sampled from a Markov chain with TRANSITIONS."""
    draws = np.random.default_rng(seed).random(count)
    bounds = TRANSITIONS.cumsum(axis=1)
    tokens = [0]
    for draw in draws[1:]:
        tokens.append(int(np.searchsorted(bounds[tokens[-1]], draw)))
    return np.array(tokens)


def model_of(tokens, vocab_size, weight=0.5):
    tokens = np.asarray(tokens)
    return InterpolatedBigram(PairCounts.of(tokens[:-1], tokens[1:], vocab_size), weight)


def test_probabilities_worked_out_by_hand():
    model = model_of([0, 1, 0, 1, 0, 2], vocab_size=4, weight=0.25)
    # predicted tokens: 0 twice, 1 twice, 2 once, 3 never; five in total, and a vocabulary of four
    assert model.unigram(np.arange(4)).tolist() == [3 / 9, 3 / 9, 2 / 9, 1 / 9]
    previous, tokens = np.array([0, 0, 0, 1, 2]), np.array([1, 2, 3, 0, 1])
    want = [
        0.25 * 2 / 3 + 0.75 * 3 / 9,
        0.25 * 1 / 3 + 0.75 * 2 / 9,
        0.75 * 1 / 9,
        0.25 * 1.0 + 0.75 * 3 / 9,
        3 / 9,  # nothing ever followed a 2
    ]
    assert model.bigram(previous, tokens).tolist() == pytest.approx(want, rel=1e-15)


def test_probabilities_sum_to_one_and_none_is_zero():
    V = 30
    tokens = np.random.default_rng(0).zipf(1.5, 500) % (V - 3)  # three ids never occur
    model = model_of(tokens, V, weight=0.9)
    previous, following = (side.ravel() for side in np.meshgrid(np.arange(V), np.arange(V), indexing="ij"))
    table = model.bigram(previous, following).reshape(V, V)
    np.testing.assert_allclose(table.sum(axis=1), 1, rtol=1e-13)
    np.testing.assert_allclose(model.unigram(np.arange(V)).sum(), 1, rtol=1e-13)
    assert table.min() > 0


def test_counts_of_pieces_add_up_to_the_counts_of_the_whole():
    tokens = np.random.default_rng(1).integers(0, 50, 1000)
    previous, following = tokens[:-1], tokens[1:]
    whole = PairCounts.of(previous, following, 50)
    parts = PairCounts.of(previous[:300], following[:300], 50) + PairCounts.of(previous[300:], following[300:], 50)
    for name in ("counts", "preceding", "pairs", "pair_counts"):
        np.testing.assert_array_equal(getattr(parts, name), getattr(whole, name))
    assert whole[np.array([2499])] == np.sum((previous == 49) & (following == 49))


def test_the_fitted_weight_is_the_likeliest():
    tokens = np.random.default_rng(2).zipf(1.3, 4000) % 40
    tokens[1::3] = (tokens[::3] * 7 % 40)[: len(tokens[1::3])]  # a third of the tokens follow from the preceding one
    counted = model_of(tokens[:2000], 40)
    previous, following = tokens[2000:-1], tokens[2001:]

    def loss(weight):
        return -np.log(InterpolatedBigram(counted.counts, weight).bigram(previous, following)).mean()

    fitted = counted.fitted(previous, following).weight
    best = min(np.linspace(0, 1, 1001)[1:-1], key=loss)
    assert fitted == pytest.approx(best, abs=1e-3)
    assert 0.1 < fitted < 0.9


def test_losses_on_a_markov_chain_are_its_entropies():
    # the stationary distribution p solves p = p T; the entropy rate is sum p(v) H(T[v]) (Shannon 1948, section 7)
    values, vectors = np.linalg.eig(TRANSITIONS.T)
    p = np.real(vectors[:, np.argmax(np.real(values))])
    p /= p.sum()
    entropy_rate = -(p[:, None] * TRANSITIONS * np.log(TRANSITIONS)).sum()
    losses = baseline_losses(Documents(markov_chain(60_000, 0)), Documents(markov_chain(60_000, 1)), 3)
    assert losses.bigram == pytest.approx(entropy_rate, abs=0.01)
    assert losses.unigram == pytest.approx(-(p * np.log(p)).sum(), abs=0.01)
    assert losses.bigram_weight > 0.95
    assert losses.num_tokens == 59_999


def test_neither_documents_nor_pieces_in_memory_change_the_losses(monkeypatch):
    train, held_out = markov_chain(500, 2), markov_chain(100, 3)
    whole = baseline_losses(Documents(train), Documents(held_out), 3)
    cut = baseline_losses(Documents(*np.split(train, [1, 2, 200, 200])), Documents(*np.split(held_out, [50])), 3)
    monkeypatch.setattr(baselines, "_CHUNK", 7)
    in_pieces = baseline_losses(Documents(*np.split(train, [33])), Documents(held_out), 3)
    for other in (cut, in_pieces):
        assert (other.num_tokens, other.bigram_weight) == (99, whole.bigram_weight)
        assert (other.unigram, other.bigram) == pytest.approx((whole.unigram, whole.bigram), rel=1e-12)


def test_the_final_counts_are_those_of_all_training_tokens():
    train, held_out = markov_chain(400, 4), markov_chain(200, 5)
    losses = baseline_losses(Documents(train), Documents(held_out), 3)
    model = model_of(train, 3, losses.bigram_weight)
    assert losses.bigram == pytest.approx(-np.log(model.bigram(held_out[:-1], held_out[1:])).mean(), rel=1e-12)


def test_the_fit_never_keeps_more_than_its_share_of_large_data(monkeypatch):
    monkeypatch.setattr(baselines, "_MOST_FITTED", 50)
    kept = []
    fitted = InterpolatedBigram.fitted

    def record(model, previous, tokens):
        kept.append(len(tokens))
        return fitted(model, previous, tokens)

    monkeypatch.setattr(InterpolatedBigram, "fitted", record)
    baseline_losses(Documents(markov_chain(5000, 6)), Documents([0, 1]), 3)
    assert 0 < kept[0] <= 50


def test_wrong_tokens_and_too_few_are_refused():
    tokens = markov_chain(100, 7)
    with pytest.raises(DataError, match=r"below the vocabulary size \(2\); got 2"):
        baseline_losses(Documents(tokens), Documents(tokens), 2)
    with pytest.raises(DataError, match="more than 20 tokens of training data; got 20"):
        baseline_losses(Documents(tokens[:20]), Documents(tokens), 3)
    with pytest.raises(DataError, match="at least 2 tokens"):
        baseline_losses(Documents(tokens), Documents([1], []), 3)
    assert math.isfinite(baseline_losses(Documents(tokens[:21]), Documents([1, 2]), 3).bigram)
