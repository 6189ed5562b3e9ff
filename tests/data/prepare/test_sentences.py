"""Boundaries of sentences and words, by rules that the tests spell out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers

from megalith.data.indexed_dataset import IndexedDataset
from megalith.data.prepare import prepare
from megalith.data.prepare.sentences import split_sentences
from megalith.data.special_tokens import bert_tokens, t5_tokens
from megalith.data.tokenizer import Tokenizer, train_byte_level_bpe
from megalith.errors import ConfigError, DataError

SENTENCES = [
    ("One. Two! Three? Four", ["One.", " Two!", " Three?", " Four"]),
    ("e.g. this is one (so it is.) And two.", ["e.g. this is one (so it is.)", " And two."]),
    ("a = 1\n\n  b = 2\n", ["a = 1\n\n", "  b = 2\n"]),
    ("\n\nfirst\n", ["\n\nfirst\n"]),
    ("pi is 3.14 now", ["pi is 3.14 now"]),
    ("\u4e00\u3002\u4e8c\uff01", ["\u4e00\u3002", "\u4e8c\uff01"]),
    ("", []),
]


@pytest.mark.parametrize(("text", "sentences"), SENTENCES)
def test_sentences_end_where_the_rule_says(text, sentences):
    assert split_sentences(text) == sentences


@given(st.text(alphabet='ab .!?\n\t"A\u3002', max_size=60))
def test_sentences_put_together_are_the_text(text):
    found = split_sentences(text)
    assert "".join(found) == text
    assert all(sentence.strip() for sentence in found) or not text.strip()


def test_words_of_byte_level_tokens_are_those_of_the_pre_tokenizer():
    text = "def __init__(self, size=128):\n    return self.size_of(x2y) + caf\u00e9\n"
    tokenizer = train_byte_level_bpe([text], 300)
    ids = np.array(tokenizer.encode(text))
    starts = tokenizer.word_starts()(ids)
    words = ["".join(map(chr, part)) for part in _parts(ids, starts, tokenizer)]
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    wanted = [piece for piece, _ in pieces]
    assert words == ["".join(_byte_text(wanted_piece)) for wanted_piece in wanted]


def _parts(ids, starts, tokenizer):
    for group in np.split(ids, np.flatnonzero(starts)[1:]):
        yield tokenizer.decode(group.tolist()).encode()


def _byte_text(piece):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    of = {chr(byte): byte for byte in printed} | {chr(256 + n): byte for n, byte in enumerate(others)}
    assert set(of) == set(alphabet)
    return map(chr, (of[character] for character in piece))


def test_a_word_piece_that_continues_a_word_begins_none():
    vocabulary = {"[UNK]": 0, "[SEP]": 1, "play": 2, "##ing": 3, "a": 4}
    library = Library(models.WordPiece(vocabulary, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens(["[SEP]"])
    tokenizer = Tokenizer(library.to_str().encode())
    assert tokenizer.word_starts()(np.array([2, 3, 3, 4, 2, 1, 3])).tolist() == [1, 0, 0, 1, 1, 1, 0]


def test_prepared_sentences_are_sequences_and_their_tokens_those_of_the_text(tmp_path):
    text = "".join(f"line {number} of the text. And more, here?\n" for number in range(4000))  # several parts
    (tmp_path / "long.txt").write_text(text)
    (tmp_path / "short.txt").write_text("One. Two.\n")
    made = prepare(
        [tmp_path / "long.txt", tmp_path / "short.txt"],
        tmp_path / "x",
        vocab_size=500,
        split_sentences=True,
        special_tokens=["bert", "t5"],
    )
    dataset = IndexedDataset(made.prefix)
    tokenizer = Tokenizer.load(made.tokenizer)
    sentences = [tokenizer.decode(dataset.get(index).tolist()) for index in range(len(dataset))]
    assert dataset.num_documents == 2
    assert "".join(sentences) == f"{text}{tokenizer.eod_text}One. Two.\n{tokenizer.eod_text}"
    assert sentences == [
        *split_sentences(text)[:-1],
        split_sentences(text)[-1] + tokenizer.eod_text,
        "One.",
        f" Two.\n{tokenizer.eod_text}",
    ]
    assert len(t5_tokens(tokenizer).sentinels) == 100
    assert tokenizer.decode([bert_tokens(tokenizer).mask]) == "[MASK]"
    assert bert_tokens(tokenizer).mask not in tokenizer.encode("[MASK]")  # text cannot forge it


def test_special_tokens_that_are_missing_or_unknown_are_named(tmp_path):
    plain = train_byte_level_bpe(["some text"], 300)
    with pytest.raises(DataError, match=r"mask token \(\[MASK\] or <mask>\).*--special-tokens bert"):
        bert_tokens(plain)
    with pytest.raises(DataError, match=r"padding token \(<pad>\) and sentinels \(.*--special-tokens t5"):
        t5_tokens(plain)
    no_sentinels = train_byte_level_bpe(["some text"], 300, ["<pad>"])
    with pytest.raises(DataError, match="a tokenizer with sentinels"):
        t5_tokens(no_sentinels)
    with pytest.raises(ConfigError, match="must be one of bert, t5, fim; got 'gpt'"):
        prepare([], tmp_path / "x", vocab_size=300, special_tokens=["gpt"])
