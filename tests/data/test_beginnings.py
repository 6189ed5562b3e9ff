"""Tokens at the beginning of a text: those of the post-processor, in prompts as in transformers, and in documents."""

import json
import pickle

import pytest
import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers, processors

from megalith.data.indexed_dataset import IndexedDataset
from megalith.data.prepare import documents, parts, prepare
from megalith.data.tokenizer import EOD, Tokenizer, train_byte_level_bpe
from megalith.errors import ConfigError, DataError

SPECIAL = {"<s>": 4, "</s>": 5, "<|user|>": 6}
BOS = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", special_tokens=[("<s>", 4)])
FRAME = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 4), ("</s>", 5)])
PROMPTS = ["a b", "<s> a <|user|> b", "<|user|> c", "d </s>"]


def content(processor: object | None) -> bytes:
    made = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2, "d": 3} | SPECIAL, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    if processor is not None:
        made.post_processor = processor
    return made.to_str().encode()


@pytest.mark.parametrize(
    ("processor", "begin"),
    [
        (None, ()),
        (processors.ByteLevel(), ()),
        (BOS, (4,)),
        (processors.Sequence([processors.ByteLevel(), BOS]), (4,)),
        (processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 5)]), ()),  # T5's
        (processors.BertProcessing(("</s>", 5), ("<s>", 4)), ()),  # a frame around a whole text, which ends it
        (processors.TemplateProcessing("<s>", special_tokens=[("<s>", 4)]), ()),  # loses the text
    ],
)
def test_a_text_begins_with_what_the_post_processor_puts_in_front_of_it(processor, begin):
    tokenizer = Tokenizer(content(processor))
    assert tokenizer.begin == begin
    assert tokenizer.encode_prompts(["a b"]) == [[*begin, 0, 1]]
    assert tokenizer.encode("a b") == [0, 1]


@pytest.mark.parametrize(
    "processor",
    [
        None,
        processors.ByteLevel(),
        BOS,
        FRAME,
        processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 5)]),
        processors.TemplateProcessing("<|user|> <s> $A </s> <|user|>", special_tokens=[*SPECIAL.items()]),
        processors.BertProcessing(("</s>", 5), ("<s>", 4)),
        processors.RobertaProcessing(("</s>", 5), ("<s>", 4)),
        processors.Sequence([processors.ByteLevel(), FRAME]),
    ],
)
def test_the_frame_is_what_the_library_puts_around_a_text(processor):
    made = content(processor)
    tokenizer, ids = Tokenizer(made), tokenizers.Tokenizer.from_str(made.decode()).encode("a b").ids
    assert tokenizer.frame == (ids[: ids.index(0)], ids[ids.index(1) + 1 :])
    assert pickle.loads(pickle.dumps(tokenizer)).frame == tokenizer.frame
    assert tokenizer.encode("a b") == [0, 1]


def test_of_several_post_processors_the_last_one_is_outermost_and_any_that_ends_a_text_frames_it():
    tokenizer = Tokenizer(content(processors.Sequence([FRAME, processors.BertProcessing(("d", 3), ("c", 2)), BOS])))
    assert (tokenizer.frame, tokenizer.begin) == (([4, 2, 4], [5, 3]), ())


TEMPLATE = json.loads(BOS.__getstate__())


@pytest.mark.parametrize(
    ("changed", "begin"),
    [
        ({"single": []}, ()),
        ({"single": [{"Sequence": {"id": "A", "type_id": 0}}]}, ()),
        ({"special_tokens": {}}, None),
        ({"special_tokens": {"<s>": {"id": "<s>", "ids": [70_000], "tokens": ["<s>"]}}}, None),
        ({"special_tokens": {"<s>": {"id": "<s>", "ids": [4] * 9, "tokens": ["<s>"] * 9}}}, None),
        ({"special_tokens": {"<s>": {"id": "<s>", "ids": [4, 5], "tokens": ["<s>", "</s>"]}}}, (4, 5)),
    ],
)
def test_a_post_processor_that_would_panic_is_read_or_refused_by_its_file(changed, begin):
    made = json.loads(content(BOS)) | {"post_processor": TEMPLATE | changed}
    if begin is None:
        with pytest.raises(DataError, match=r"post_processor of x\.json must prepend at most 8 tokens"):
            Tokenizer(json.dumps(made).encode(), name="x.json")
    else:
        assert Tokenizer(json.dumps(made).encode()).begin == begin


CHARSMAP = {"type": "Precompiled"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"normalizer": CHARSMAP | {"precompiled_charsmap": "AAAA"}}, r"x\.json must be a tokenizer\.json of Hugging"),
        ({"normalizer": CHARSMAP | {"precompiled_charsmap": "BAAAAP////8="}}, r"x\.json cannot encode this text"),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, r"x\.json cannot encode this text"),
    ],
)
def test_a_file_on_which_the_library_panics_is_refused_by_its_name(changed, message):
    made = json.dumps(json.loads(content(BOS)) | changed).encode()
    with pytest.raises(DataError, match=message):
        Tokenizer(made, name="x.json").encode("a b")


@pytest.mark.parametrize("processor", [None, BOS])
def test_prompts_have_the_ids_that_transformers_gives_them(processor, tmp_path):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "t.json").write_bytes(content(processor))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "t.json"))
    tokenizer = Tokenizer.load(tmp_path / "t.json")
    want = [theirs(prompt).input_ids for prompt in PROMPTS]
    if processor is not None:  # a prompt that already spells out the beginning token gets it once; theirs has it twice
        want[1] = want[1][1:]
    assert tokenizer.encode_prompts(PROMPTS, special_tokens=True) == want
    # and text remains text, unless requested
    assert not {5, 6} & {id for ids in tokenizer.encode_prompts(PROMPTS) for id in ids}
    assert tokenizer.encode_batch(PROMPTS) == [ids[len(tokenizer.begin) :] for ids in tokenizer.encode_prompts(PROMPTS)]


@pytest.mark.parametrize("processor", [BOS, processors.Sequence([processors.ByteLevel(), BOS])])
def test_what_the_post_processor_puts_in_front_can_be_taken_out_of_the_file(processor, tmp_path):
    Tokenizer(content(processor)).without_beginning().save(tmp_path / "tokenizer.json")
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert (theirs.encode("a b").ids, theirs.encode("a", "b").ids) == ([0, 1], [0, 1])
    assert Tokenizer.load(tmp_path / "tokenizer.json").begin == ()


def test_what_begins_and_ends_a_text_is_pickled_and_asks_for_rows():
    tokenizer = pickle.loads(pickle.dumps(Tokenizer(content(BOS), "</s>", ends=[6, 5])))
    assert (tokenizer.begin, tokenizer.ends, tokenizer.eod) == ((4,), (5, 6), 5)
    assert Tokenizer(content(None), "a").num_rows == 4
    assert Tokenizer(content(BOS), "a").num_rows == 5
    assert pickle.loads(pickle.dumps(tokenizer.framed(begin=()))).begin == ()


def bos_tokenizer(path):
    """Bytes, with <s> before every text; its id is that of some byte."""
    made = json.loads(train_byte_level_bpe(["x"], 257)._content)
    made["post_processor"] = json.loads(BOS.__getstate__())
    made["post_processor"]["special_tokens"]["<s>"]["ids"] = [7]
    path.write_text(json.dumps(made))
    return Tokenizer.load(path)


def test_every_document_begins_so_once_however_the_text_is_cut(tmp_path, monkeypatch):
    for room in (documents, parts):
        monkeypatch.setattr(room, "BLOCK_BYTES", 64)
    monkeypatch.setattr(parts, "_LEAST_BYTES", 128)
    tokenizer = bos_tokenizer(tmp_path / "t.json")
    assert tokenizer.begin == (7,)
    texts = ["a long text\n" * 100, "short", "", "some more\n" * 20]
    files = [tmp_path / f"{number}.txt" for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    prepare(files, tmp_path / "c", tokenizer=tmp_path / "t.json")
    prepare(files, tmp_path / "plain", tokenizer=tmp_path / "t.json", bos=False)
    found, plain = IndexedDataset(tmp_path / "c"), IndexedDataset(tmp_path / "plain")
    starts = found.document_starts()
    got = [found.tokens[starts[d] : starts[d + 1]].tolist() for d in range(found.num_documents)]
    assert got == [[7, *tokenizer.encode(text), tokenizer.eod] if text else [] for text in texts]
    assert plain.num_tokens == found.num_tokens - 3


def test_sentences_are_framed_by_their_datasets(tmp_path):
    bos_tokenizer(tmp_path / "t.json")
    (tmp_path / "text.txt").write_text("One sentence. And another.")
    prepare([tmp_path / "text.txt"], tmp_path / "c", tokenizer=tmp_path / "t.json", split_sentences=True)
    assert 7 not in IndexedDataset(tmp_path / "c").tokens


@pytest.mark.parametrize("settings", [{"vocab_size": 300}, {"tokenizer": "plain.json"}, {"split_sentences": True}])
def test_leaving_out_what_no_document_would_have_is_refused(settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train_byte_level_bpe(["x"], 257).save(tmp_path / "plain.json")
    bos_tokenizer(tmp_path / "t.json")
    (tmp_path / "text.txt").write_text("text")
    given = {} if "vocab_size" in settings else {"tokenizer": "t.json"}
    with pytest.raises(ConfigError, match=r"--no-bos drops .*; leave it out"):
        prepare(["text.txt"], "c", bos=False, **(given | settings))


@pytest.mark.parametrize(
    ("kinds", "single", "pair", "types"),
    [
        (["bert"], "[CLS]one two[SEP]", "[CLS]one two[SEP] three[SEP]", [0, 0, 0, 0, 1, 1]),
        (["bert", "fim"], "[CLS]one two[SEP]", "[CLS]one two[SEP] three[SEP]", [0, 0, 0, 0, 1, 1]),
        (["t5"], f"one two{EOD}", f"one two{EOD} three{EOD}", [0, 0, 0, 1, 1]),
        (["bert", "t5"], "one two", "one two three", [0, 0, 1]),  # no template would suit both
        ([], "one two", "one two three", [0, 0, 1]),
    ],
)
def test_a_tokenizer_trained_for_a_model_frames_its_texts_only_outside_of_ours(kinds, single, pair, types, tmp_path):
    (tmp_path / "text.txt").write_text("one two three\n" * 9)
    made = prepare([tmp_path / "text.txt"], tmp_path / "c", vocab_size=400, special_tokens=kinds)
    theirs = tokenizers.Tokenizer.from_file(str(made.tokenizer))
    found = theirs.encode("one two", " three")
    assert theirs.decode(theirs.encode("one two").ids, skip_special_tokens=False) == single
    assert theirs.decode(found.ids, skip_special_tokens=False) == pair
    assert found.type_ids == types
    ours = Tokenizer.load(made.tokenizer)
    assert ours.begin == ()
    assert ours.encode_prompts(["one two"]) == [theirs.encode("one two", add_special_tokens=False).ids]
    again = prepare([tmp_path / "text.txt"], tmp_path / "d", tokenizer=made.tokenizer)
    for prefix in (made.prefix, again.prefix):
        assert ours.decode(IndexedDataset(prefix).tokens.tolist()) == "one two three\n" * 9 + EOD
