"""gpt_dataset: every token once per epoch, samples computed from their index alone, correct document ends."""

import itertools
import os
import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.data.gpt_dataset import EvaluationDataset, GPTDataset, stack_samples, with_labels_ahead
from megalith.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megalith.errors import ConfigError, DataError
from megalith.numerics.permutation import KeyedPermutation
from tests.effort import effort

EOD = 0


def write(prefix, documents, **origin):
    with IndexedDatasetBuilder(prefix, np.int32) as builder:
        for document in documents:
            builder.add_document(document)
        builder.finalize(**origin)
    return prefix


def numbered(prefix, lengths):
    """Documents of the given lengths whose tokens are 0, 1, 2, ... through the file: a token is its own position."""
    ends = np.cumsum(lengths)
    return write(prefix, [np.arange(end - length, end) for length, end in zip(lengths, ends, strict=True)])


def stream(lengths, seed, num_epochs):
    """The endless stream spelled out: whole documents, epoch after epoch, in the orders of the keyed permutation."""
    starts = np.cumsum([0, *lengths])
    orders = [
        KeyedPermutation(len(lengths), seed, f"documents-{e}")(np.arange(len(lengths))) for e in range(num_epochs)
    ]
    return np.concatenate([np.arange(starts[d], starts[d + 1]) for order in orders for d in order])


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(lambda lengths: sum(lengths) >= 2),
    S=st.integers(1, 30),
    seed=st.integers(0, 9),
)
def test_the_samples_of_an_epoch_are_the_windows_that_begin_in_it(lengths, S, seed, tmp_path_factory):
    N, num_epochs = sum(lengths), 3
    dataset = GPTDataset(numbered(tmp_path_factory.mktemp("x") / "x", lengths), S, seed)
    written_out = stream(lengths, seed, num_epochs + 1 + -(-S // N))
    sample = 0
    for epoch in range(num_epochs):
        starts = range(-(-epoch * N // S) * S, (epoch + 1) * N, S)
        found = [dataset[sample + n] for n in range(len(starts))]
        sample += len(starts)
        windows = [[*sample.tokens.tolist(), int(sample.labels[-1])] for sample in found]
        assert sorted(windows) == sorted(written_out[start : start + S + 1].tolist() for start in starts)
        assert all(sample.tokens[1:].tolist() == sample.labels[:-1].tolist() for sample in found)


def test_in_an_epoch_every_token_is_read_once_and_predicted_once(tmp_path):
    dataset = GPTDataset(numbered(tmp_path / "x", [3, 0, 8, 1, 28]), 5, seed=1)
    for num_epochs in (1, 2, 3):
        samples = [dataset[i] for i in range(num_epochs * 40 // 5)]
        read = Counter(np.concatenate([sample.tokens for sample in samples]).tolist())
        predicted = Counter(np.concatenate([sample.labels for sample in samples]).tolist())
        assert read == dict.fromkeys(range(40), num_epochs)
        # nothing predicts the first token of the stream, and the last window predicts the first of the next epoch
        assert (read - predicted).total() == (predicted - read).total() <= 1
        assert predicted.total() == 40 * num_epochs


@pytest.mark.parametrize("lengths", [[10] * 100, [1000]], ids=["documents", "windows of one document"])
def test_order_is_shuffled_anew_in_every_epoch_and_by_seed(lengths, tmp_path):
    prefix = numbered(tmp_path / "x", lengths)
    dataset = GPTDataset(prefix, 10, seed=1)
    epochs = [[int(dataset[e * 100 + n].tokens[0]) for n in range(100)] for e in range(3)]
    other = [int(GPTDataset(prefix, 10, seed=2)[n].tokens[0]) for n in range(100)]
    for one in (*epochs, other):
        assert sorted(one) == list(range(0, 1000, 10))
        assert abs(np.corrcoef(one, range(100))[0, 1]) < 0.4
    assert len({tuple(one) for one in (*epochs, other)}) == 4


def test_a_sample_depends_on_its_index_alone(tmp_path):
    prefix = numbered(tmp_path / "x", [3, 0, 8, 1, 5])
    in_order = [GPTDataset(prefix, 4, seed=1)[i] for i in range(40)]
    backwards = GPTDataset(IndexedDataset(prefix), 4, seed=1)
    for i in reversed(range(40)):
        for name in ("tokens", "labels", "loss_mask", "documents"):
            assert np.array_equal(getattr(backwards[i], name), getattr(in_order[i], name))
    assert np.array_equal(pickle.loads(pickle.dumps(backwards))[7].tokens, in_order[7].tokens)


def test_ten_billion_tokens_are_reached_at_once(tmp_path):
    # sparse: 10 documents of 10^9 zero bytes each
    prefix = write(tmp_path / "x", [[0]] * 10)
    index = bytearray((tmp_path / "x.idx").read_bytes())
    index[17] = 1  # uint8
    index[34:74] = np.full(10, 10**9, "<i4").tobytes()
    index[74:154] = (np.arange(10) * 10**9).astype("<i8").tobytes()
    (tmp_path / "x.idx").write_bytes(index)
    os.truncate(tmp_path / "x.bin", 10**10)
    (tmp_path / "x.json").unlink()
    dataset = GPTDataset(prefix, 4096, seed=1)
    found = []
    cost = effort(lambda: found.append(dataset[10**8]))  # in epoch 40
    assert found[0].tokens.sum() == 0
    assert cost.lines < 2000  # nothing is traversed: an epoch has 2.4 million windows
    assert cost.peak_bytes < 1e6  # a sample takes 86 thousand


def test_documents_are_numbered_and_end_where_the_file_or_an_eod_ends_them(tmp_path):
    # one document in the file, three by the tokens
    prefix = write(tmp_path / "x", [[1, 2, EOD, 3, EOD, EOD, 4, 5]], eod=EOD)
    sample = EvaluationDataset(prefix, 7, mask_eod=True)[0]
    assert sample.tokens.tolist() == [1, 2, 0, 3, 0, 0, 4]
    assert sample.documents.tolist() == [0, 0, 0, 1, 1, 2, 3]
    assert sample.loss_mask.tolist() == [True, True, False, True, False, False, True]
    assert sample.documents.dtype == np.int32

    # without a sidecar, only the file says so
    prefix = write(tmp_path / "y", [[1, 2], [], [3, EOD], [4, 5, 6]])
    sample = EvaluationDataset(prefix, 6, mask_eod=True)[0]
    assert sample.documents.tolist() == [0, 0, 1, 1, 2, 2]
    assert sample.loss_mask.tolist() == [True, False, True, False, True, True]
    assert EvaluationDataset(prefix, 6)[0].loss_mask.all()


def test_in_training_documents_are_those_of_the_stream(tmp_path):
    documents = [[d + 1] * 3 + [EOD] for d in range(20)]
    dataset = GPTDataset(write(tmp_path / "x", documents, eod=EOD), 16, seed=3, mask_eod=True)
    for i in range(40):
        sample = dataset[i]
        ends = np.flatnonzero(sample.tokens == EOD)
        assert ends.tolist() == [3, 7, 11, 15]
        assert sample.documents.tolist() == np.repeat(range(4), 4).tolist()
        assert np.flatnonzero(~sample.loss_mask).tolist() == ends.tolist()


@pytest.mark.parametrize("mask_eod", [False, True])
def test_labels_ahead_count_within_a_document_where_they_count_by_themselves(mask_eod, tmp_path):
    random = np.random.default_rng(0)
    documents = [np.append(random.integers(1, 30, length), EOD) for length in random.integers(1, 9, 20)]
    dataset = GPTDataset(write(tmp_path / "x", documents, eod=EOD), 12, 0, mask_eod=mask_eod)
    batch = stack_samples([dataset[i] for i in range(6)], range(6))
    found, B, S, M = with_labels_ahead(batch, 3), 6, 12, 3
    assert np.array_equal(found.labels[0], batch.labels)
    assert np.array_equal(found.loss_mask[0], batch.loss_mask)
    num_counted = 0
    for depth, row, s in itertools.product(range(1, 1 + M), range(B), range(S)):
        ended = EOD in batch.tokens[row, s : s + depth] or s + depth >= S
        counts = not ended and bool(batch.loss_mask[row, s + depth])
        assert found.loss_mask[depth, row, s] == counts
        if counts:
            assert found.labels[depth, row, s] == batch.labels[row, s + depth]
        num_counted += counts
    assert 0 < num_counted < M * B * S
    assert not found.labels[3, :, -3:].any()


@given(lengths=st.lists(st.integers(0, 9), max_size=8).filter(lambda lengths: sum(lengths) >= 2), S=st.integers(1, 30))
@settings(max_examples=40)
def test_evaluation_predicts_every_token_but_the_first_once_and_in_order(lengths, S, tmp_path_factory):
    dataset = EvaluationDataset(numbered(tmp_path_factory.mktemp("x") / "x", lengths), S)
    samples = [dataset[i] for i in range(len(dataset))]
    kept = [(sample.tokens[sample.loss_mask], sample.labels[sample.loss_mask]) for sample in samples]
    assert np.concatenate([labels for _, labels in kept]).tolist() == list(range(1, sum(lengths)))
    assert np.concatenate([tokens for tokens, _ in kept]).tolist() == list(range(sum(lengths) - 1))
    arrays = [array for sample in samples for name, array in vars(sample).items() if name != "num_tokens"]
    assert {array.shape for array in arrays} == {(S,)}
    *whole, last = (sample.num_tokens for sample in samples)
    assert (set(whole) <= {S}, last) == (True, sum(lengths) - 1 - len(whole) * S)
    for past in (len(dataset), -1):
        with pytest.raises(IndexError, match=f"numbered (from 0|0 to .*); got {past}"):
            dataset[past]


def test_what_has_nothing_to_predict_is_refused(tmp_path):
    for name, documents in {"none": [], "empty": [[], []], "one": [[], [5]]}.items():
        prefix = write(tmp_path / name, documents)
        for make in (lambda prefix: GPTDataset(prefix, 4, 0), lambda prefix: EvaluationDataset(prefix, 4)):
            with pytest.raises(DataError, match=rf"{name} must contain at least two tokens.* it has {name == 'one':d}"):
                make(prefix)
    with pytest.raises(ConfigError, match="at least 1; got 0"):
        GPTDataset(write(tmp_path / "x", [[1, 2]]), 0, 0)
    with pytest.raises(IndexError, match="from 0; got -1"):
        GPTDataset(tmp_path / "x", 4, 0)[-1]
