"""BERT and T5 samples: packing against a plain implementation, distributions of the masks, computed from the index."""

import string
from dataclasses import replace
from itertools import pairwise, product
from math import comb

import numpy as np
import pytest

import megalith.data.sentence_dataset as sentence_dataset
import megalith.data.sentence_packing as packing
import megalith.data.t5_dataset as t5_dataset
from megalith.config.masking_config import MaskingConfig
from megalith.data.bert_dataset import BertDataset, stack_bert_samples
from megalith.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megalith.data.sentence_dataset import HeldOutSamples
from megalith.data.special_tokens import SPECIAL_TOKENS, T5Tokens, bert_tokens, t5_tokens
from megalith.data.t5_dataset import T5Dataset, T5Sample, decoder_length, fill_spans
from megalith.data.tokenizer import train_byte_level_bpe
from megalith.errors import ConfigError, DataError
from megalith.numerics.draws import uniform_rows

S = 48


@pytest.fixture(scope="module")
def tokenizer():
    special = dict.fromkeys([*SPECIAL_TOKENS["bert"], *SPECIAL_TOKENS["t5"]])
    return train_byte_level_bpe(["some words of a text, and more words\n"], 400, list(special))


@pytest.fixture(scope="module")
def prefix(tokenizer, tmp_path_factory):
    """Documents of 0 to 20 sentences of 1 to 12 tokens, each document ended by eod."""
    random = np.random.default_rng(0)
    text = sorted(set(tokenizer.encode("some words of a text, and more words\n")))
    prefix = tmp_path_factory.mktemp("sentences") / "x"
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for number in random.integers(0, 21, 60):
            lengths = random.integers(1, 13, number)
            tokens = random.choice(text, lengths.sum() + 1)
            tokens[-1] = tokenizer.eod
            if number:
                lengths[-1] += 1
                builder.add_document(tokens, lengths.tolist())
            else:
                builder.add_document([])
        builder.finalize(eod=tokenizer.eod, vocab_size=tokenizer.vocab_size)
    return prefix


def same_documents(prefix, tokenizer, number, lengths):
    """``number`` documents with the same sentences, of these lengths and of different tokens; returns the text."""
    text = tokenizer.encode(string.digits + string.ascii_lowercase[::-1])[: sum(lengths)]
    assert len(set(text)) == sum(lengths)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(number):
            builder.add_document([*text, tokenizer.eod], [*lengths[:-1], lengths[-1] + 1])
        builder.finalize(eod=tokenizer.eod, vocab_size=tokenizer.vocab_size)
    return text


def segments(sample, tokenizer):
    """The original tokens of both segments, in the order of the text."""
    text = sample.labels[1 : sample.num_tokens - 1]
    [middle] = np.flatnonzero(text == bert_tokens(tokenizer).separator)
    both = text[:middle].tolist(), text[middle + 1 :].tolist()
    return both[::-1] if sample.is_swapped else both


def assert_distributed(counts, expected):
    """Chi-square within five standard deviations of its mean."""
    counts, expected = np.array(counts), np.array(expected)
    assert expected.min() > 5
    degrees = len(expected) - 1
    assert ((counts - expected) ** 2 / expected).sum() < degrees + 5 * np.sqrt(2 * degrees)


def packed_one_by_one(lengths, starts, room, least, probability, seed):
    """Megatron's loop over the sentences of each document, with ``least`` for its limit of two on the last sample."""
    found = []
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        if end - begin < least or max(lengths[begin:end]) > room:
            continue
        first = begin
        while first < end:
            drawn = uniform_rows(seed, "target lengths", first, 1)[0]
            target = 2 + int(drawn[1] * (room - 1)) if drawn[0] < probability else room
            last, total = first, 0
            while last < end and (total < target or last - first < least):
                total += lengths[last]
                last += 1
            last = end if end - last < least else last
            found.append((first, last, target))
            first = last
    return found


def test_samples_are_packed_as_sentence_by_sentence(monkeypatch):
    random = np.random.default_rng(0)
    for seed in range(40):
        monkeypatch.setattr(packing, "_BLOCK", int(random.integers(1, 40)))
        starts = np.cumsum([0, *random.integers(0, 15, random.integers(1, 8))])
        lengths = random.integers(1, 12, int(starts[-1]))
        room, least = int(random.integers(8, 30)), int(random.integers(1, 3))
        found = packing.pack_sentences(
            lengths, starts, room=room, min_sentences=least, short_sequence_probability=0.3, seed=seed
        )
        rows = list(zip(found.firsts.tolist(), found.ends.tolist(), found.targets.tolist(), strict=True))
        assert rows == packed_one_by_one(lengths, starts, room, least, 0.3, seed)


def written(prefix, room):
    """The text of each document, one character per token, and where its sentences begin and end, split at ``room``."""
    data = IndexedDataset(prefix)
    bounds = data.sequence_starts().tolist()
    for first, end in zip(data.document_indices[:-1], data.document_indices[1:], strict=True):
        start, last = bounds[first], bounds[end] - 1  # the last token of a non-empty document is eod
        breaks = {*bounds[first:end], last}
        for one, other in pairwise(sorted(breaks)):
            breaks.update(range(one, other, room))
        yield as_text(data.tokens[start:last]), {place - start for place in breaks}


def as_text(tokens):
    return "".join(map(chr, tokens))


def places(text, piece):
    return [place for place in range(len(text)) if text.startswith(piece, place)]


def follow(text, breaks, first, second, are_whole):
    """Whether ``second`` comes after ``first``, in different sentences; if sentences are whole, directly after it."""
    for start, after in product(places(text, first), places(text, second)):
        end = start + len(first)
        if are_whole and end == after and {start, end, after + len(second)} <= breaks:
            return True
        if not are_whole and breaks & {*range(end, after + 1)}:
            return True
    return False


# rows that every sentence fits in, and rows for which long ones are split
ROWS = pytest.mark.parametrize(("S", "long_sentences"), [(S, "refuse"), (12, "cut")])


@ROWS
def test_the_segments_of_a_bert_sample_stand_in_a_document_in_the_order_it_tells(prefix, tokenizer, S, long_sentences):
    dataset = BertDataset(prefix, tokenizer, S, 3, MaskingConfig(long_sentences=long_sentences))
    documents = list(written(prefix, S - 3))
    separator = as_text([bert_tokens(tokenizer).separator])
    seen = set()
    for index in range(400):
        sample = dataset[index]
        row = np.where(sample.loss_mask, sample.labels, sample.tokens)[1 : sample.num_tokens]
        *segments, nothing = as_text(row).split(separator)
        assert nothing == ""  # after the last separator
        first, second = segments[::-1] if sample.is_swapped else segments
        assert any(follow(*document, first, second, not sample.is_truncated) for document in documents), f"of {index}"
        seen.add((sample.is_swapped, sample.is_truncated))
    assert len(seen) == 4


@ROWS
def test_the_filled_text_of_a_t5_sample_stands_in_a_document(prefix, tokenizer, S, long_sentences):
    masking = MaskingConfig(long_sentences=long_sentences)
    dataset = T5Dataset(prefix, tokenizer, S, decoder_length(S, masking.probability), 3, masking)
    documents = list(written(prefix, S - 1))
    seen = set()
    for index in range(200):
        sample = dataset[index]
        filled, _ = fill_spans(sample, t5_tokens(tokenizer))
        found = as_text(filled[:-1])
        assert any(
            place in breaks and (sample.is_truncated or place + len(found) in breaks)
            for text, breaks in documents
            for place in places(text, found)
        ), f"of {index}"
        seen.add(sample.is_truncated)
    assert len(seen) == 2


def test_bert_samples_are_two_segments_with_masked_words_in_between(prefix, tokenizer):
    dataset, special = BertDataset(prefix, tokenizer, S, 3, MaskingConfig()), bert_tokens(tokenizer)
    kinds = np.zeros(3, int)
    swapped = shorter = 0
    for index in range(400):
        sample = dataset[index]
        N, labels = sample.num_tokens, sample.labels
        assert labels[0] == special.classifier
        assert np.flatnonzero(labels == special.separator).tolist() == [sample.token_types.argmax() - 1, N - 1]
        assert sample.token_types.tolist() == sorted(sample.token_types[:N].tolist()) + [0] * (S - N)
        assert (labels[N:] == special.padding).all()
        assert tokenizer.eod not in labels
        assert not sample.loss_mask[labels == special.separator].any()
        assert not sample.loss_mask[[0, *range(N, S)]].any()
        assert (sample.tokens == labels)[~sample.loss_mask].all()
        masked, right = sample.tokens[sample.loss_mask], labels[sample.loss_mask]
        kinds += [(masked == special.mask).sum(), (masked == right).sum(), len(masked)]
        swapped += sample.is_swapped
        shorter += sample.num_tokens < S
    share = kinds[:2] / kinds[2]
    V = tokenizer.vocab_size
    for found, wanted in zip(share, (0.8 + 0.1 / V, 0.1 + 0.1 / V), strict=True):
        assert abs(found - wanted) < 5 * np.sqrt(wanted * (1 - wanted) / kinds[2])
    assert abs(swapped - 200) < 5 * np.sqrt(400 * 0.25)
    assert shorter > 0


def test_random_tokens_are_drawn_from_the_whole_vocabulary(prefix, tokenizer):
    dataset = BertDataset(prefix, tokenizer, S, 3, MaskingConfig(probability=0.9))
    samples = [dataset[index] for index in range(800)]
    tokens, labels = (
        np.concatenate([getattr(sample, name)[sample.loss_mask] for sample in samples]) for name in ("tokens", "labels")
    )
    V, mask = tokenizer.vocab_size, bert_tokens(tokenizer).mask
    is_random = (tokens != labels) & (tokens != mask)  # also drawn, but not seen: [MASK], and the label itself
    expected = 0.1 / V * (len(labels) - np.bincount(labels, minlength=V))
    counts = np.bincount(tokens[is_random], minlength=V)
    assert_distributed(np.delete(counts, mask), np.delete(expected, mask))


def test_segments_are_split_at_every_sentence_boundary_equally_often(tokenizer, tmp_path):
    text = same_documents(tmp_path / "x", tokenizer, 32, [4] * 6)
    dataset = BertDataset(tmp_path / "x", tokenizer, 27, 3, MaskingConfig(short_sequence_probability=0.0))
    counts = dict.fromkeys(range(4, 24, 4), 0)
    for index in range(500):
        _, second = segments(dataset[index], tokenizer)
        counts[text.index(second[0])] += 1
    assert_distributed(list(counts.values()), [100] * 5)


def test_excess_tokens_are_removed_from_both_ends_of_the_longer_segment_equally_often(tokenizer, tmp_path):
    text = same_documents(tmp_path / "x", tokenizer, 32, [10, 20])
    dataset = BertDataset(tmp_path / "x", tokenizer, 28, 3, MaskingConfig(short_sequence_probability=0.0))
    counts = [0] * 6  # samples with this many tokens removed from the front
    for index in range(400):
        shorter, longer = segments(dataset[index], tokenizer)
        num_removed = text.index(longer[0]) - 10
        assert (shorter, longer) == (text[:10], text[10:][num_removed:][:15])
        counts[num_removed] += 1
    assert_distributed(counts, [400 * comb(5, number) / 2**5 for number in range(6)])


class WithSentences(BertDataset):
    """Samples, each after the sentences that it is made of."""

    def _sample(self, sentences, target, draws):
        return as_text(np.concatenate(sentences)), super()._sample(sentences, target, draws)


def test_epochs_differ_in_order_and_masks_but_not_in_their_groups_of_sentences(prefix, tokenizer):
    dataset = WithSentences(prefix, tokenizer, S, 3, MaskingConfig())
    N = dataset.num_samples
    epochs = [[dataset[epoch * N + place] for place in range(N)] for epoch in range(3)]
    orders = [[group for group, _ in epoch] for epoch in epochs]
    in_text_order = [group for group, _ in HeldOutSamples(dataset)]
    assert len(set(in_text_order)) == N
    assert all(sorted(order) == sorted(in_text_order) for order in orders)
    for one, other in pairwise([in_text_order, *orders]):
        assert sum(map(str.__eq__, one, other)) < 8  # random orders have one place in common on average
    masks = [{group: sample.loss_mask.tobytes() for group, sample in epoch} for epoch in epochs]
    for one, other in pairwise(masks):
        assert sum(one[group] == other[group] for group in one) < N / 4  # the shortest samples have few to choose from


def test_a_sample_depends_on_its_index_alone(prefix, tokenizer):
    dataset, again = (BertDataset(prefix, tokenizer, S, 3, MaskingConfig()) for _ in range(2))
    index = dataset.num_samples + 5
    samples = [dataset[each] for each in range(index + 1)]
    late = again[index]  # as a resumed run reads it first
    assert all(np.array_equal(getattr(late, name), getattr(samples[-1], name)) for name in ("tokens", "labels"))
    batch = stack_bert_samples(samples[:3], [4, 5, 6])
    assert batch.tokens.shape == batch.token_types.shape == (3, S)


def test_held_out_samples_are_masked_independently(tokenizer, tmp_path):
    same_documents(tmp_path / "x", tokenizer, 20, [4] * 6)
    masking = MaskingConfig(short_sequence_probability=0.0, whole_words=False)
    samples = [list(HeldOutSamples(BertDataset(tmp_path / "x", tokenizer, 27, 3, masking))) for _ in range(2)]
    masks, again = ([sample.loss_mask.tobytes() for sample in each] for each in samples)
    assert len(masks) == 20
    assert len(set(masks)) > 15
    assert masks == again


def test_t5_samples_give_the_text_back(prefix, tokenizer):
    T = decoder_length(S, 0.15)
    dataset, special = T5Dataset(prefix, tokenizer, S, T, 3, MaskingConfig()), t5_tokens(tokenizer)
    whole = T5Dataset(prefix, tokenizer, S, T, 3, MaskingConfig(probability=1e-9))
    sentinels = special.sentinels.tolist()
    for index in range(200):
        sample, text = dataset[index], whole[index]
        encoder = sample.tokens[: sample.num_tokens].tolist()
        labels = sample.labels[: sample.num_decoder_tokens].tolist()
        assert sample.decoder_tokens[: sample.num_decoder_tokens].tolist() == [special.padding, *labels[:-1]]
        assert sample.loss_mask.sum() == sample.num_decoder_tokens
        assert encoder[-1] == labels[-1] == special.end
        used = [token for token in encoder if token in sentinels]
        assert used == [token for token in labels if token in sentinels] == sentinels[: len(used)]
        filled, is_missing = fill_spans(sample, special)
        assert filled.tolist() == text.tokens[: text.num_tokens].tolist()
        assert is_missing.sum() == len(labels) - len(used) - 1
        assert text.num_decoder_tokens == 1


def test_a_sample_is_filled_with_what_its_decoder_learns():
    special = T5Tokens(0, 1, np.array([90, 91, 92]))
    tokens = np.array([5, 90, 6, 7, 91, 1, 0, 0])  # 5 10 11 6 7 12, the end, padding
    labels = np.array([90, 10, 11, 91, 12, 1, 0])
    text, is_missing = fill_spans(T5Sample(tokens, np.roll(labels, 1), labels, labels > 0, 6, 6, False), special)
    assert text.tolist() == [5, 10, 11, 6, 7, 12, 1]
    assert is_missing.tolist() == [False, True, True, False, False, True, False]


def t5_samples(prefix, tokenizer, num_sentinels, T, monkeypatch):
    """200 samples of a tokenizer with this many sentinels, for a decoder of T tokens."""
    few = replace(t5_tokens(tokenizer), sentinels=t5_tokens(tokenizer).sentinels[:num_sentinels])
    monkeypatch.setattr(t5_dataset, "t5_tokens", lambda _: few)
    dataset = T5Dataset(prefix, tokenizer, S, T, 3, MaskingConfig(max_ngram=2))
    return few, [dataset[index] for index in range(200)]


def test_a_t5_sample_has_no_more_spans_than_there_are_sentinels(prefix, tokenizer, monkeypatch, caplog):
    few, samples = t5_samples(prefix, tokenizer, 3, 64, monkeypatch)
    used = [np.isin(sample.labels[sample.loss_mask], few.sentinels).sum() for sample in samples]
    assert max(used) == 3
    assert "has 3 sentinels, but a sample of" in caplog.text


def test_a_t5_sample_has_no_more_to_learn_than_the_decoder_holds(prefix, tokenizer, monkeypatch, caplog):
    _, samples = t5_samples(prefix, tokenizer, 100, 12, monkeypatch)
    assert max(sample.num_decoder_tokens for sample in samples) == 12
    assert not caplog.text


def test_samples_that_are_packed_otherwise_are_other_data(prefix, tokenizer):
    found = [
        BertDataset(prefix, tokenizer, S, 0, MaskingConfig(**how)).identity()["samples"]
        for how in ({}, {"short_sequence_probability": 0.0}, {"long_sentences": "cut"})
    ]
    assert len(set(found)) == 3


def test_a_sentence_that_is_too_long_is_cut_where_it_reaches_the_room():
    starts, ends, documents = np.array([0, 3, 13, 20]), np.array([3, 13, 19, 24]), np.array([0, 2, 2, 4])
    begins, stops, of_document = sentence_dataset._cut(starts, ends, documents, 4)
    pieces = [(0, 3), (3, 7), (7, 11), (11, 13), (13, 17), (17, 19), (20, 24)]
    assert list(zip(begins.tolist(), stops.tolist(), strict=True)) == pieces
    assert of_document.tolist() == [0, 4, 4, 7]


def test_it_says_how_many_sentences_it_cuts_if_any(prefix, tokenizer, caplog):
    BertDataset(prefix, tokenizer, 8, 0, MaskingConfig(long_sentences="cut"))  # room for 5 tokens
    starts, ends, _ = sentence_dataset._sentences(IndexedDataset(prefix))
    lengths = ends - starts
    [line] = [record.getMessage() for record in caplog.records]
    assert line == f"{prefix}: cut {(lengths > 5).sum()} of {len(lengths)} sentences, those of more than 5 tokens"
    caplog.clear()
    BertDataset(prefix, tokenizer, 3 + int(lengths.max()), 0, MaskingConfig(long_sentences="cut"))
    assert not caplog.records


def test_bad_data_are_refused_before_a_sample_is_read(prefix, tokenizer, tmp_path):
    whole = tmp_path / "whole"
    with IndexedDatasetBuilder(whole, np.uint16) as builder:
        builder.add_document([200, 201, 202])
        builder.finalize()
    with pytest.raises(DataError, match="--split-sentences"):
        BertDataset(whole, tokenizer, S, 0, MaskingConfig())
    with pytest.raises(DataError, match=r"at most 5 tokens.*data.masking.long_sentences=skip"):
        BertDataset(prefix, tokenizer, 8, 0, MaskingConfig())
    with pytest.raises(ConfigError, match="must leave room for at least 2 tokens of text; it leaves 1; use 128"):
        BertDataset(prefix, tokenizer, 4, 0, MaskingConfig())
    with pytest.raises(DataError, match=r"documents of 2 or more sentences, each of at most 3 tokens; it has none"):
        BertDataset(prefix, tokenizer, 6, 0, MaskingConfig(long_sentences="skip"))
    skipping = BertDataset(prefix, tokenizer, 14, 0, MaskingConfig(long_sentences="skip"))
    assert skipping.num_samples > 0
    with pytest.raises(DataError, match=r"\[MASK\]"):
        BertDataset(prefix, train_byte_level_bpe(["x"], 257), S, 0, MaskingConfig())
    with pytest.raises(ConfigError, match="which is always enough"):
        T5Dataset(prefix, tokenizer, S, 5, 0, MaskingConfig())
