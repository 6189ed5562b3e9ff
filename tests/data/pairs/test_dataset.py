"""Samples of pairs: texts between special tokens, drawn negatives, and rows of several texts."""

import json
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from itertools import chain, combinations, pairwise

import numpy as np
import pytest

from megalith.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megalith.data.pairs.dataset import PairDataset, PairSample, PairTexts, row_lengths, stack_pairs
from megalith.data.samples import Identified
from megalith.data.special_tokens import bert_tokens
from megalith.errors import ConfigError, DataError
from tests.data.pairs.examples import PAIRS, write_pairs, write_tokenizer

S = 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pairs")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return write_tokenizer(folder / "tokenizer.json")


@pytest.fixture(scope="module")
def prefix(folder, tokenizer):
    return write_pairs(folder)


def plain(sample, tokenizer):
    """The texts of a sample, which must each be between the special tokens."""
    special = bert_tokens(tokenizer)
    for text in sample.texts:
        assert (text[0], text[-1], text.dtype) == (special.classifier, special.separator, np.int64)
    return [tokenizer.decode(text[1:-1].tolist()) for text in sample.texts]


def test_each_pair_has_its_first_negatives_in_file_order(prefix, tokenizer):
    for given, n in ((None, 2), (0, 0), (1, 1)):
        texts = PairTexts(prefix, tokenizer, S, num_negatives=given)
        assert (len(texts), texts.num_negatives) == (3, n)
        want = [[query, positive, *negatives[:n]] for query, positive, negatives in PAIRS]
        assert [plain(texts[i], tokenizer) for i in range(3)] == want
        for outside in (-1, 3):
            with pytest.raises(IndexError, match=f"numbered 0 to 2; got {outside}"):
                texts[outside]


def test_every_epoch_has_every_pair_in_an_order_of_its_own(prefix, tokenizer):
    dataset = PairDataset(PairTexts(prefix, tokenizer, S), seed=3)
    assert dataset.samples_per_epoch == Fraction(3)
    orders = [[plain(dataset[epoch * 3 + i], tokenizer)[0] for i in range(3)] for epoch in range(12)]
    assert all(sorted(order) == sorted(query for query, _, _ in PAIRS) for order in orders)
    assert len({tuple(order) for order in orders}) > 3
    with pytest.raises(IndexError, match="from 0; got -1"):
        dataset[-1]


def test_negatives_are_drawn_without_replacement_and_evenly(prefix, tokenizer):
    dataset = PairDataset(PairTexts(prefix, tokenizer, S), seed=3)
    drawn = {query: Counter() for query, _, _ in PAIRS}
    for index in range(1500):
        query, positive, *negatives = plain(dataset[index], tokenizer)
        assert positive == next(pair[1] for pair in PAIRS if pair[0] == query)
        assert len(set(negatives)) == 2
        drawn[query][frozenset(negatives)] += 1
    for query, _, negatives in PAIRS:
        possible = [frozenset(two) for two in combinations(negatives, 2)]
        assert drawn[query].keys() == set(possible)
        # binomial: the standard deviation of a count is below the root of its mean
        mean = 500 / len(possible)
        assert all(abs(count - mean) < 5 * mean**0.5 for count in drawn[query].values())


def test_a_sample_depends_on_its_index_alone(prefix, tokenizer):
    early, late = (PairDataset(PairTexts(prefix, tokenizer, S), seed=3) for _ in range(2))
    samples = [early[index] for index in range(20)]
    other = PairDataset(PairTexts(prefix, tokenizer, S), seed=4)
    assert plain(late[19], tokenizer) == plain(samples[19], tokenizer)
    assert [plain(other[i], tokenizer) for i in range(20)] != [plain(sample, tokenizer) for sample in samples]


def plain_row_lengths(pairs, tokenizer, n):
    """The definition: the longest of all choices of n negatives."""
    lengths = [[len(tokenizer.encode(text)) + 2 for text in (query, positive)] for query, positive, _ in pairs]
    return [
        sum(both) + max(sum(len(tokenizer.encode(text)) + 2 for text in some) for some in combinations(negatives, n))
        for both, (_, _, negatives) in zip(lengths, pairs, strict=True)
    ]


def test_rows_must_hold_the_longest_negatives(prefix, tokenizer):
    for n in (0, 1, 2):
        want = plain_row_lengths(PAIRS, tokenizer, n)
        assert row_lengths(IndexedDataset(prefix), n).tolist() == want
        longest = max(want)
        assert len(PairTexts(prefix, tokenizer, longest, num_negatives=n)) == 3
        with pytest.raises(DataError, match=rf"(?s)pair {np.argmax(want)} has up to {longest}; use data.seq_length="):
            PairTexts(prefix, tokenizer, longest - 1, num_negatives=n)
    dataset = PairDataset(PairTexts(prefix, tokenizer, longest), seed=0)
    assert max(sum(map(len, dataset[i].texts)) for i in range(300)) == longest


def test_a_text_that_is_longer_than_the_table_of_positions_is_refused(prefix, tokenizer):
    data = IndexedDataset(prefix)
    firsts, lengths = data.document_indices, data.sequence_lengths + 2
    of_pairs = [lengths[first:end] for first, end in pairwise(firsts)]
    for n, longest in ((0, max(max(each[:2]) for each in of_pairs)), (2, max(lengths))):
        PairTexts(prefix, tokenizer, S, num_negatives=n, num_positions=longest)
        says = rf"must have at most {longest - 1} tokens .*has one of {longest}; .*--max-passage-tokens {longest - 3}"
        with pytest.raises(DataError, match=says):
            PairTexts(prefix, tokenizer, S, num_negatives=n, num_positions=longest - 1)


def test_a_pair_with_too_few_negatives_is_refused(prefix, tokenizer):
    with pytest.raises(DataError, match=r"at least 3 negatives; pair 1 has 2; use 2 negatives, or remove pairs"):
        PairTexts(prefix, tokenizer, S, num_negatives=3)
    with pytest.raises(ConfigError, match=r"0 or more; got -1; use 2"):
        PairTexts(prefix, tokenizer, S, num_negatives=-1)


def test_what_holds_no_pairs_is_refused(tokenizer, tmp_path):
    for name, documents, origin, says in (
        ("text", [[1, 2]], {}, r"must hold pairs .*; prepare them with: megalith data pairs"),
        ("empty", [], {"pairs": True}, "it has none"),
        ("short", [[1, 2]], {"pairs": True}, "it has 1 texts in pair 0"),
    ):
        with IndexedDatasetBuilder(tmp_path / name, "uint16") as builder:
            for document in documents:
                builder.add_document(document)
            builder.finalize(**origin)
        with pytest.raises(DataError, match=says):
            PairTexts(tmp_path / name, tokenizer, S)


def test_a_token_outside_the_vocabulary_is_refused_when_it_is_read(prefix, tokenizer):
    data = IndexedDataset(prefix)
    largest = int(data.tokens.max())
    texts = PairTexts(prefix, tokenizer, S, vocab_size=largest, num_negatives=0)
    first_two = [[data.get(number) for number in first + np.arange(2)] for first in data.document_indices[:3]]
    holds = [largest in np.concatenate(both) for both in first_two]
    assert any(holds)
    for index in np.flatnonzero(holds).tolist():
        with pytest.raises(DataError, match=rf"sample {index} cannot be used: .* below {largest}"):
            texts[index]


def test_rows_hold_all_texts_and_then_padding(prefix, tokenizer):
    texts, padding = PairTexts(prefix, tokenizer, S), bert_tokens(tokenizer).padding
    batch = stack_pairs([texts[0], texts[2]], [5, 9], S, padding)
    for row, sample in enumerate((texts[0], texts[2])):
        packed = list(chain(*(text.tolist() for text in sample.texts)))
        assert batch.tokens[row].tolist() == packed + [padding] * (S - len(packed))
        assert batch.lengths[row].tolist() == [len(text) for text in sample.texts]
    assert batch.lengths.shape == batch.text_ids.shape == (2, 4)
    assert {each.dtype for each in (batch.tokens, batch.lengths, batch.text_ids, batch.row_ids)} == {np.dtype("i8")}
    assert (batch.row_ids.tolist(), batch.positions.tolist()) == ([5, 9], list(range(S)))
    assert batch.counted.tolist() == [True, True]


def test_columns_and_rows_that_do_not_count(prefix, tokenizer):
    texts = PairTexts(prefix, tokenizer, S)
    batch = stack_pairs([texts[0], texts[1], texts[2]], [0, 1, 2], S, 0)
    columns = np.array([0, 1, 6, 7])
    part = batch.columns(columns).counting([True, False, True]).counting([True, True, False])
    assert np.array_equal(part.tokens, batch.tokens[:, columns])
    assert np.array_equal(part.positions, columns)
    assert np.array_equal(part.lengths, batch.lengths)
    assert np.array_equal(part.text_ids, batch.text_ids)
    assert part.counted.tolist() == [True, False, False]
    assert batch.counted.tolist() == [True] * 3


def test_equal_texts_have_equal_ids_in_every_process():
    texts = [np.array([2, 10, 11, 3]), np.array([2, 10, 3]), np.array([2, 10, 11, 3]), np.array([2, 11, 10, 3])]
    ids = stack_pairs([PairSample(tuple(texts))], [0], 32, 0).text_ids[0].tolist()
    assert ids[0] == ids[2]
    assert len(set(ids)) == 3
    program = (  # the definition, by itself
        "import hashlib, struct; h = hashlib.blake2b(struct.pack('<3q', 2, 10, 3), digest_size=8); "
        "print(struct.unpack('<q', h.digest())[0])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) == ids[1]


def test_other_texts_or_pairs_are_other_data(prefix, tokenizer, tmp_path):
    texts = PairTexts(prefix, tokenizer, S)
    assert isinstance(PairDataset(texts, 0), Identified)
    before = PairDataset(texts, 0).identity()
    assert before == PairTexts(prefix, tokenizer, S, num_negatives=0).identity()
    (tmp_path / "tokenizer.json").write_bytes((prefix.parent / "tokenizer.json").read_bytes())
    query, positive, negatives = PAIRS[0]
    same = write_pairs(tmp_path, "same")
    changed = write_pairs(tmp_path, "changed", [(query, positive, ["other", *negatives[1:]]), *PAIRS[1:]])
    assert PairTexts(same, tokenizer, S).identity() == before
    after = PairTexts(changed, tokenizer, S).identity()
    assert {name for name in before if before[name] != after[name]} == {"text", "pairs"}
    # the same texts, of which the last negative of one pair is now the query of the next
    moved = [(*PAIRS[0][:2], negatives[:2]), (negatives[2], PAIRS[1][0], [PAIRS[1][1], *PAIRS[1][2]]), PAIRS[2]]
    regrouped = PairTexts(write_pairs(tmp_path, "moved", moved), tokenizer, S).identity()
    assert {name for name in before if before[name] != regrouped[name]} == {"pairs"}
    assert json.dumps(before)
