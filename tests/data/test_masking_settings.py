"""The masking settings of BERT and T5 datasets: their defaults are the field's, and each setting acts."""

import numpy as np
import pytest

from megalith.config.masking_config import MaskingConfig
from megalith.data.bert_dataset import BertDataset
from megalith.data.indexed_dataset import IndexedDatasetBuilder
from megalith.data.sentence_dataset import HeldOutSamples
from megalith.data.special_tokens import SPECIAL_TOKENS
from megalith.data.t5_dataset import T5Dataset, decoder_length
from megalith.data.tokenizer import train_byte_level_bpe
from megalith.data.word_masks import WordMasking

TEXT = "zebra crossings puzzle quick walking jumpers"  # words of several tokens each
S = 64


@pytest.fixture(scope="module")
def tokenizer():
    return train_byte_level_bpe(["a"], 400, list(dict.fromkeys([*SPECIAL_TOKENS["bert"], *SPECIAL_TOKENS["t5"]])))


def written(prefix, tokenizer, sentence, number):
    """One document of ``number`` times the ids ``sentence``."""
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add_document([*sentence * number, tokenizer.eod], [len(sentence)] * (number - 1) + [len(sentence) + 1])
        builder.finalize(eod=tokenizer.eod, vocab_size=tokenizer.vocab_size)
    return prefix


@pytest.fixture(scope="module")
def prefix(tokenizer, tmp_path_factory):
    return written(tmp_path_factory.mktemp("words") / "x", tokenizer, tokenizer.encode(f" {TEXT}"), 40)


def bert(prefix, tokenizer, **masking):
    return BertDataset(prefix, tokenizer, S, 3, MaskingConfig(**masking), sentence_order=False)


def t5(prefix, tokenizer, **masking):
    settings = MaskingConfig(**masking)
    return T5Dataset(prefix, tokenizer, S, decoder_length(S, settings.probability), 3, settings)


@pytest.mark.parametrize(
    ("settings", "of_bert", "of_t5"),
    [
        # Devlin et al. 2018, section 3.1, and Megatron's runs of up to 3 words; Raffel et al. 2019, section 3.1.4, and
        # Megatron's geometric runs of up to 10
        ({}, (0.15, 3, False, True), (0.15, 10, True, True)),
        ({"probability": 0.3}, (0.3, 3, False, True), (0.3, 10, True, True)),
        ({"max_ngram": 5}, (0.15, 5, False, True), (0.15, 5, True, True)),
        ({"use_geometric_distribution": True}, (0.15, 3, True, True), (0.15, 10, True, True)),
        ({"use_geometric_distribution": False}, (0.15, 3, False, True), (0.15, 10, False, True)),
        ({"whole_words": False}, (0.15, 3, False, False), (0.15, 10, True, False)),
    ],
    ids=str,
)
def test_each_kind_of_model_has_the_fields_defaults(settings, of_bert, of_t5, prefix, tokenizer):
    assert bert(prefix, tokenizer, **settings).word_masking == WordMasking(*of_bert)
    assert t5(prefix, tokenizer, **settings).word_masking == WordMasking(*of_t5)


def test_whole_words_are_masked_unless_told_otherwise(prefix, tokenizer):
    starts = tokenizer.word_starts()

    def num_cut(dataset):
        """Borders of masked runs, over 60 samples, that are inside of a word."""
        cut = 0
        for index in range(60):
            sample = dataset[index]
            begins = np.append(starts(sample.labels[: sample.num_tokens - 1]), True)
            is_border = np.diff(sample.loss_mask[: sample.num_tokens].astype(int), prepend=0) != 0
            cut += int((is_border & ~begins).sum())
        return cut

    assert num_cut(bert(prefix, tokenizer)) == 0
    assert num_cut(bert(prefix, tokenizer, whole_words=False)) > 60


@pytest.mark.parametrize("settings", [{}, {"short_sequence_probability": 0.5}], ids=str)
def test_the_share_of_samples_that_is_shortened_is_a_tenth_or_as_set(settings, tokenizer, tmp_path):
    room = S - 3
    written(tmp_path / "x", tokenizer, tokenizer.encode("z"), 2000 * room)
    lengths = [sample.num_tokens - 2 for sample in HeldOutSamples(bert(tmp_path / "x", tokenizer, **settings))]
    num_short = sum(length < room for length in lengths[:-1])
    # lengths are drawn from 2 to the full one
    wanted = settings.get("short_sequence_probability", 0.1) * (room - 2) / (room - 1)
    assert abs(num_short - wanted * len(lengths)) < 5 * np.sqrt(wanted * (1 - wanted) * len(lengths))
