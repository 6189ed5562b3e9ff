"""tokenizer: round trips, pitfalls of published tokenizer.json files, and ends of documents."""

import hashlib
import json
import pickle
import subprocess
import sys

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from megalith.data.tokenizer import Tokenizer, train_byte_level_bpe
from megalith.errors import ConfigError, DataError
from tests.storage.memory_store import MemoryStore, OwnBytes

TEXTS = ["the cat sat on the mat\n" * 20, "the rat ate the cat\n" * 20]
AWKWARD = ["", " ", "\n\n  x", "naïve 日本 🦜\u200d\x00", "<|endoftext|>", "a<|endoftext|>b"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_byte_level_bpe(TEXTS, 270)


def word_tokenizer(**special: int) -> tokenizers.Tokenizer:
    """Words a to d, in a foreign file: it truncates at 2 tokens, pads, and adds special tokens around text."""
    made = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2, "d": 3} | special, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens([AddedToken(name, special=True) for name in special])
    made.enable_truncation(2)
    made.enable_padding(length=8)
    return made


def test_merges_are_those_that_the_algorithm_gives_by_hand():
    # "ababab" and "abc": ab 4 times, then ab+ab (2, with overlap), then abab+ab (1), then ab+c (1)
    trained = train_byte_level_bpe(["ababab abc"], 259)
    merges = json.loads(trained._content)["model"]["merges"]
    assert merges == [["a", "b"], ["ab", "ab"]]
    ids = trained.encode("ababab")
    assert ids == [258, 257]
    assert [trained.decode([i]) for i in ids] == ["abab", "ab"]


@pytest.mark.parametrize("sign", ["a", "é", " ", "-"])
def test_training_sees_a_word_without_end_in_parts_of_which_no_merge_is_longer(sign):
    text = f"x {sign * 3000} y"
    parts = [text[start:stop] for start, stop in ((0, 1024), (1024, 1536), (1536, 2048), (2048, 2560), (2560, 3004))]
    trained = train_byte_level_bpe([text], 280)
    assert trained.sha256 == train_byte_level_bpe(parts, 280).sha256
    assert max(len(trained.decode([id])) for id in range(1, trained.vocab_size)) < 1024


@pytest.mark.parametrize("text", [*AWKWARD, *TEXTS])
def test_every_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eod not in ids  # text cannot forge the end of a document


def test_a_batch_is_encoded_as_its_texts_are(tokenizer):
    assert tokenizer.encode_batch(AWKWARD) == [tokenizer.encode(text) for text in AWKWARD]


def test_the_end_of_a_document_is_one_token(tokenizer):
    assert (tokenizer.eod, tokenizer.decode([tokenizer.eod]), tokenizer.vocab_size) == (0, "<|endoftext|>", 270)


def test_training_gives_the_same_bytes_in_another_process(tokenizer):
    code = f"from megalith.data.tokenizer import *; print(train_byte_level_bpe({TEXTS!r}, 270).sha256)"
    for hash_seed in "01":
        environment = {"PYTHONHASHSEED": hash_seed, "TOKENIZERS_PARALLELISM": "false"}
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
        assert run.stdout.strip() == tokenizer.sha256


def test_saving_loading_and_pickling_keep_the_bytes(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    assert hashlib.sha256((tmp_path / "tokenizer.json").read_bytes()).hexdigest() == tokenizer.sha256
    for same in (Tokenizer.load(tmp_path / "tokenizer.json"), pickle.loads(pickle.dumps(tokenizer))):
        assert (same.sha256, same.eod, same.vocab_size) == (tokenizer.sha256, tokenizer.eod, tokenizer.vocab_size)
        assert same.encode("the cat") == tokenizer.encode("the cat")


def test_a_file_that_cuts_and_pads_and_frames_does_so_no_more(tmp_path):
    made = word_tokenizer(**{"</s>": 9})
    made.post_processor = processors.TemplateProcessing("</s> $A </s>", special_tokens=[("</s>", 9)])
    assert len(made.encode("a b c d").ids) == 8
    assert 9 in made.encode("a b c d").ids
    made.save(str(tmp_path / "t.json"))
    loaded = Tokenizer.load(tmp_path / "t.json")
    assert loaded.encode("a b c d") == [0, 1, 2, 3]
    assert (loaded.eod, loaded.vocab_size) == (9, 10)  # ids 4 to 8 are gaps


@pytest.mark.parametrize("name", ["<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>"])
def test_the_usual_names_of_the_end_are_known(name):
    assert Tokenizer(word_tokenizer(**{name: 4, "<other>": 5}).to_str().encode()).eod == 4


def test_a_tokenizer_without_a_known_end_needs_to_be_told():
    content = word_tokenizer(**{"<stop>": 4}).to_str().encode()
    with pytest.raises(DataError, match=r"--eod .*special tokens are \['<stop>'\]"):
        Tokenizer(content, name="x.json")
    assert Tokenizer(content, "<stop>").eod == Tokenizer(content, 4).eod == 4
    for wrong in ("<halt>", 5, -1):
        with pytest.raises(DataError, match=rf"end-of-document token, {wrong!r}; it has none"):
            Tokenizer(content, wrong)


def test_ids_for_which_a_model_has_no_row_are_refused_but_for_special_tokens_that_no_text_becomes():
    made = word_tokenizer(**{"</s>": 4, "<image>": 5})
    tokenizer = Tokenizer(made.to_str().encode(), name="x.json")
    tokenizer.check_fits("models/a", 5)
    assert 5 not in tokenizer.encode("a <image> b")
    with pytest.raises(
        DataError, match=r"x\.json must have ids below 4, .*models/a; text gives ids up to 4 \('</s>'\)"
    ):
        tokenizer.check_fits("models/a", 4)
    made.add_tokens(["plain"])
    with pytest.raises(DataError, match=r"'plain'"):
        Tokenizer(made.to_str().encode()).check_fits("models/a", 5)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"model": 1}'])
def test_a_file_that_is_no_tokenizer_is_refused_by_name(content, tmp_path):
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(DataError, match=r"t\.json must be a tokenizer\.json"):
        Tokenizer.load(tmp_path / "t.json")


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(DataError, match=r"gone\.json .* No such file"):
        Tokenizer.load(tmp_path / "gone.json")


def test_a_vocabulary_without_room_for_the_bytes_is_refused():
    with pytest.raises(ConfigError, match=r"at least 257 entries, .*; got 256"):
        train_byte_level_bpe(TEXTS, 256)


def test_a_text_too_small_for_the_vocabulary_says_so(caplog):
    assert train_byte_level_bpe(["ab ab"], 1000).vocab_size < 270
    assert "1000 were requested" in caplog.text


def test_a_dataset_names_its_tokenizer_in_any_store(tmp_path):
    trained = train_byte_level_bpe(["some text"], 258)
    trained.save(tmp_path / "t.json")
    store = MemoryStore(OwnBytes())
    store.put("t.json", (tmp_path / "t.json").read_bytes())
    (tmp_path / "data").mkdir()
    for prefix, name in (
        (store / "corpus", "t.json"),
        (tmp_path / "data" / "corpus", "../t.json"),
        (f"file://{tmp_path}/data/corpus", "../t.json"),
        (f"file://{tmp_path}/data/corpus", str(tmp_path / "t.json")),
    ):
        assert Tokenizer.beside(prefix, name).sha256 == trained.sha256
    with pytest.raises(DataError, match=r"u\.json must be a tokenizer\.json"):
        Tokenizer.beside(store / "corpus", "u.json")


SPECIAL = ["<pad>", "</s>", "<extra_id_0>"]
LETTERS = "▁abd</>_0eirstx"


def unigram():
    """As T5's: special tokens are pieces as well, and no piece scores better."""
    pieces = [("<unk>", 0.0), *((token, 0.0) for token in SPECIAL), *((letter, -3.0) for letter in LETTERS)]
    return models.Unigram(pieces, unk_id=0)


def merging():
    vocabulary = {piece: id for id, piece in enumerate([*LETTERS, "</", "s>", *SPECIAL])}
    return models.BPE(vocabulary, [("<", "/"), ("s", ">"), ("</", "s>")], unk_token="x")


def merging_only_within_words():
    """Merges of ``a`` and ``<`` come first, so that ``a</s>`` has no such token, but ``d</s>`` has."""
    vocabulary = {piece: id for id, piece in enumerate([*LETTERS, "a<", "</", "</s", *SPECIAL])}
    return models.BPE(vocabulary, [("a", "<"), ("<", "/"), ("</", "s"), ("</s", ">")], unk_token="x")


def merging_with_prefixes():
    """A piece within a word begins with ##, which a merge removes."""
    letters = [*LETTERS, *(f"##{letter}" for letter in LETTERS)]
    vocabulary = {piece: id for id, piece in enumerate([*letters, "</", "##s>", *SPECIAL])}
    merges = [("<", "##/"), ("##s", "##>"), ("</", "##s>")]
    return models.BPE(vocabulary, merges, unk_token="x", continuing_subword_prefix="##")


def merging_with_suffixes():
    """A piece that ends a word ends in @, so that ``</s>`` is merged within a word, but not on its own."""
    letters = [*LETTERS, *(f"{letter}@" for letter in LETTERS)]
    vocabulary = {piece: id for id, piece in enumerate([*letters, "</", "s>", *SPECIAL])}
    merges = [("<", "/"), ("s", ">"), ("</", "s>")]
    return models.BPE(vocabulary, merges, unk_token="x", end_of_word_suffix="@")


def merging_special_tokens():
    """Merges go on from a special token."""
    vocabulary = {piece: id for id, piece in enumerate([*LETTERS, "</", "s>", *SPECIAL, "</s>a", "</s>ab"])}
    merges = [("<", "/"), ("s", ">"), ("</", "s>"), ("</s>", "a"), ("</s>a", "b")]
    return models.BPE(vocabulary, merges, unk_token="x")


MODELS = [
    unigram,
    merging,
    merging_only_within_words,
    merging_with_prefixes,
    merging_with_suffixes,
    merging_special_tokens,
]


@pytest.mark.parametrize("model", MODELS)
def test_text_cannot_forge_a_special_token_that_is_a_piece_of_the_model(model):
    made = tokenizers.Tokenizer(model())
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(prepend_scheme="never"), decoders.Metaspace()
    made.add_special_tokens(SPECIAL)
    tokenizer, text = Tokenizer(made.to_str().encode()), "a <extra_id_0> b</s>a d</s> </s>"
    ids = tokenizer.encode(text)
    special = set(map(tokenizer.token_id, SPECIAL))
    assert special.isdisjoint(ids)
    assert tokenizer.decode(ids).replace("##", "").replace("@", "") == text
    assert tokenizer.encode("a dab") == made.encode("a dab").ids
    assert pickle.loads(pickle.dumps(tokenizer)).encode(text) == ids
    [prompt] = tokenizer.encode_prompts([text], special_tokens=True)
    assert [id for id in prompt if id in special] == [tokenizer.token_id(SPECIAL[place]) for place in (2, 1, 1, 1)]
    assert tokenizer.encode(text) == ids


def of_an_older_format(tree):
    tree["model"]["merges"] = ["#version: 0.2", *map(" ".join, tree["model"]["merges"])]


@pytest.mark.parametrize("change", [of_an_older_format, lambda tree: tree.pop("version")], ids=["merges", "version"])
def test_files_of_other_formats_are_read_the_same_way(change):
    made = tokenizers.Tokenizer(merging())
    made.add_special_tokens(SPECIAL)
    tree = json.loads(made.to_str())
    change(tree)
    assert Tokenizer(json.dumps(tree).encode()).encode("b</s>b") == Tokenizer(made.to_str().encode()).encode("b</s>b")


def test_a_model_without_a_token_for_unknown_words_needs_none_for_its_special_tokens():
    pieces = [("</s>", 0.0), ("▁", -2.0), ("a", -3.0), ("b", -3.0)]  # no < or /
    made = tokenizers.Tokenizer(models.Unigram(pieces))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.add_special_tokens(["</s>"])
    tokenizer = Tokenizer(made.to_str().encode())
    assert tokenizer.encode("ab a") == [1, 2, 3, 1, 2]
    with pytest.raises(DataError, match="token for unknown words"):
        tokenizer.encode("a</s>")


def test_a_word_that_spells_a_special_token_is_unknown():
    made = word_tokenizer(**{"</s>": 9})
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = Tokenizer(made.to_str().encode())
    assert tokenizer.encode("b </s> c") == [1, 0, 2]
    assert tokenizer.token_id("</s>") == 9


def test_a_word_may_spell_the_token_for_unknown_words():
    made = tokenizers.Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1, "</s>": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["[UNK]", "</s>"])
    assert Tokenizer(made.to_str().encode()).encode("a b [UNK] </s>") == [0, 1, 1, 1]
