"""Inverse cloze: a sentence and its block, as the text has them, drawn from the index of the sample."""

from collections import Counter
from itertools import accumulate, pairwise

import numpy as np
import pytest

from megalith.data.indexed_dataset import IndexedDatasetBuilder
from megalith.data.pairs.dataset import stack_pairs
from megalith.data.pairs.inverse_cloze import InverseClozeDataset
from megalith.data.samples import Identified
from megalith.data.sentence_dataset import HeldOutSamples
from megalith.data.special_tokens import SPECIAL_TOKENS, bert_tokens
from megalith.data.tokenizer import train_byte_level_bpe
from megalith.errors import ConfigError, DataError
from tests.data.pairs.examples import write_pairs

S = 32  # room for 28 tokens of text


@pytest.fixture(scope="module")
def tokenizer():
    return train_byte_level_bpe(["words\n"], 262, SPECIAL_TOKENS["bert"])


def write_sentences(prefix, tokenizer, documents):
    """Writes documents of sentences of these lengths, and returns their sentences; each token occurs once."""
    number = 100
    found = []
    with IndexedDatasetBuilder(prefix, np.int32) as builder:
        for lengths in documents:
            ends = list(accumulate(lengths, initial=number))
            sentences = [tuple(range(*bounds)) for bounds in pairwise(ends)]
            number = ends[-1]
            tokens = [token for sentence in sentences for token in sentence]
            builder.add_document([*tokens, tokenizer.eod], [*lengths[:-1], lengths[-1] + 1])
            found.append(sentences)
        builder.finalize(eod=tokenizer.eod, vocab_size=number)
    return found


def both_texts(sample, tokenizer):
    """Query and block without the special tokens, between which they must be."""
    special = bert_tokens(tokenizer)
    assert len(sample.texts) == 2
    assert all((text[0], text[-1]) == (special.classifier, special.separator) for text in sample.texts)
    return tuple(tuple(text[1:-1].tolist()) for text in sample.texts)


def joined(sentences):
    return tuple(token for sentence in sentences for token in sentence)


def random_documents(seed=0, longest=14):
    random = np.random.default_rng(seed)
    return [random.integers(1, longest + 1, random.integers(1, 12)).tolist() for _ in range(40)]


def test_a_block_is_a_run_of_the_text_with_or_without_its_query(tokenizer, tmp_path):
    documents = write_sentences(tmp_path / "x", tokenizer, random_documents())
    dataset = InverseClozeDataset(tmp_path / "x", tokenizer, S, 3, keep_probability=0.5)
    of_token = {token: number for number, text in enumerate(documents) for sentence in text for token in sentence}
    sentences = {sentence for text in documents for sentence in text}
    kept = 0
    for index in range(600):
        query, block = both_texts(dataset[index], tokenizer)
        assert query in sentences
        assert block
        assert len(query) + len(block) + 4 <= S
        assert {of_token[token] for token in block} == {of_token[query[0]]}
        # tokens are numbered through the text, so a gap can only be where the query was
        gaps = [(one + 1, other - 1) for one, other in pairwise(block) if other != one + 1]
        if set(query) & set(block):
            kept += 1
            assert set(query) <= set(block)
            assert gaps == []
        else:
            assert gaps in ([], [(query[0], query[-1])])
    assert abs(kept - 300) < 5 * 600**0.5 / 2  # five standard deviations


def test_a_sentence_is_removed_from_nine_blocks_of_ten(tokenizer, tmp_path):
    write_sentences(tmp_path / "x", tokenizer, [[7, 7, 7, 7]] * 3)
    for given, share in (({}, 0.1), ({"keep_probability": 0.0}, 0.0), ({"keep_probability": 1.0}, 1.0)):
        dataset = InverseClozeDataset(tmp_path / "x", tokenizer, S + 7, 0, **given)
        found = [both_texts(dataset[index], tokenizer) for index in range(1000)]
        num_kept = sum(query[0] in block for query, block in found)
        assert abs(num_kept - 1000 * share) <= 5 * (1000 * share * (1 - share)) ** 0.5


def test_every_sentence_of_a_block_is_the_query_equally_often(tokenizer, tmp_path):
    [document] = write_sentences(tmp_path / "x", tokenizer, [[7, 3, 8, 10]])
    dataset = InverseClozeDataset(tmp_path / "x", tokenizer, S, 0, keep_probability=0.0)
    counts = Counter(both_texts(dataset[index], tokenizer) for index in range(2000))
    want = {(query, joined(other for other in document if other != query)) for query in document}
    assert counts.keys() == want
    assert all(abs(count - 500) < 5 * (2000 * 0.25 * 0.75) ** 0.5 for count in counts.values())


def test_a_block_that_is_too_long_loses_its_end_but_not_its_query(tokenizer, tmp_path):
    [document] = write_sentences(tmp_path / "x", tokenizer, [[9, 9, 9, 9]])  # more than 28 are reached by the fourth
    text = joined(document)
    for keep, want in (
        (0.0, [text[9:28], text[:9] + text[18:28], text[:18] + text[27:28], text[:19]]),
        (1.0, [text[:19], text[:19], text[8:27], text[17:36]]),
    ):
        dataset = InverseClozeDataset(tmp_path / "x", tokenizer, S, 0, keep_probability=keep)
        found = {both_texts(dataset[index], tokenizer) for index in range(100)}
        assert found == set(zip(document, want, strict=True))


def test_documents_of_one_sentence_are_left_out_and_it_says_so(tokenizer, tmp_path, caplog):
    documents = write_sentences(tmp_path / "x", tokenizer, [[5], [4, 4], [6], [3, 3, 3]])
    dataset = InverseClozeDataset(tmp_path / "x", tokenizer, S, 0)
    [line] = [record.getMessage() for record in caplog.records]
    assert line == f"{tmp_path / 'x'}: left out 2 of 4 documents, those of a single sentence"
    queries = {both_texts(dataset[index], tokenizer)[0] for index in range(100)}
    assert queries == {*documents[1], *documents[3]}
    caplog.clear()
    write_sentences(tmp_path / "y", tokenizer, [[4, 4], [3, 3, 3]])
    InverseClozeDataset(tmp_path / "y", tokenizer, S, 0)
    assert not caplog.records
    write_sentences(tmp_path / "alone", tokenizer, [[5], [6]])
    with pytest.raises(DataError, match="must be split into sentences"):
        InverseClozeDataset(tmp_path / "alone", tokenizer, S, 0)


def test_sentences_of_more_than_half_a_row_are_cut(tokenizer, tmp_path, caplog):
    [document] = write_sentences(tmp_path / "x", tokenizer, [[20, 9]])
    dataset = InverseClozeDataset(tmp_path / "x", tokenizer, S, 0, keep_probability=0.0)
    [line] = [record.getMessage() for record in caplog.records]
    assert line.endswith("cut 1 of 2 sentences, those of more than 14 tokens")
    pieces = [document[0][:14], document[0][14:], document[1]]
    assert {both_texts(dataset[index], tokenizer)[0] for index in range(100)} == set(pieces)


def test_epochs_have_the_same_blocks_in_other_orders_and_with_other_queries(tokenizer, tmp_path):
    write_sentences(tmp_path / "x", tokenizer, random_documents())
    dataset = InverseClozeDataset(tmp_path / "x", tokenizer, S, 3, keep_probability=0.0)
    N = dataset.num_samples
    assert dataset.samples_per_epoch == N > 20
    epochs = [[both_texts(dataset[epoch * N + place], tokenizer) for place in range(N)] for epoch in range(2)]
    held_out = [both_texts(sample, tokenizer) for sample in HeldOutSamples(dataset)]
    in_text_order = [min(query + block) for query, block in held_out]
    assert in_text_order == sorted(in_text_order)
    assert epochs[0] != epochs[1]
    assert len({*epochs[0], *epochs[1], *held_out}) > 1.5 * N


def test_a_sample_and_held_out_data_depend_on_their_index_and_seed_alone(tokenizer, tmp_path):
    write_sentences(tmp_path / "x", tokenizer, random_documents())
    early, late, other = (InverseClozeDataset(tmp_path / "x", tokenizer, S, seed) for seed in (3, 3, 4))
    samples = [both_texts(early[index], tokenizer) for index in range(50)]
    assert both_texts(late[49], tokenizer) == samples[49]
    assert [both_texts(other[index], tokenizer) for index in range(50)] != samples
    held_out, again = (HeldOutSamples(dataset) for dataset in (early, late))
    assert len(held_out) == early.num_samples
    last = len(held_out) - 1
    assert both_texts(again[last], tokenizer) == [both_texts(each, tokenizer) for each in held_out][last]
    with pytest.raises(IndexError):
        held_out[len(held_out)]


def test_rows_hold_the_longest_samples(tokenizer, tmp_path):
    write_sentences(tmp_path / "x", tokenizer, random_documents(longest=30))
    for seq_length in (6, 7, S):
        dataset = InverseClozeDataset(tmp_path / "x", tokenizer, seq_length, 0, keep_probability=0.5)
        samples = [dataset[index] for index in range(300)]
        batch = stack_pairs(samples, range(300), seq_length, bert_tokens(tokenizer).padding)
        assert batch.lengths.shape == (300, 2)
        assert batch.lengths.sum(1).max() == seq_length
        assert batch.lengths.min() > 2


def test_what_cannot_be_used_is_refused(tokenizer, tmp_path):
    write_sentences(tmp_path / "x", tokenizer, [[4, 4]])
    for keep in (-0.1, 1.1):
        with pytest.raises(ConfigError, match=f"from 0 to 1; got {keep}; use 0.1"):
            InverseClozeDataset(tmp_path / "x", tokenizer, S, 0, keep_probability=keep)
    with pytest.raises(ConfigError, match="room for at least 2 tokens of text; it leaves 1; use 128"):
        InverseClozeDataset(tmp_path / "x", tokenizer, 5, 0)
    with pytest.raises(DataError, match="must contain texts; it holds pairs"):
        InverseClozeDataset(write_pairs(tmp_path, "pairs"), tokenizer, S, 0)
    with pytest.raises(DataError, match=r"sample 0 cannot be used: .* below 104"):
        InverseClozeDataset(tmp_path / "x", tokenizer, S, 0, vocab_size=104)[0]
    plain = train_byte_level_bpe(["words"], 258)
    with pytest.raises(DataError, match="a classifier token"):
        InverseClozeDataset(tmp_path / "x", plain, S, 0)


def test_other_text_is_other_data(tokenizer, tmp_path):
    for name, documents in (("x", [[4, 4]]), ("y", [[4, 5]])):
        write_sentences(tmp_path / name, tokenizer, documents)
    x, y = (InverseClozeDataset(tmp_path / name, tokenizer, S, 0) for name in "xy")
    assert isinstance(x, Identified)
    assert x.identity() == InverseClozeDataset(tmp_path / "x", tokenizer, S, 0, keep_probability=0.0).identity()
    assert x.identity() != y.identity()
    assert x.identity()["samples"].startswith("1 of 28 tokens, 2 sentences or more of up to 14 tokens")
