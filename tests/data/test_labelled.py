"""Labelled texts: two columns are read, the classes are stored next to the dataset, and samples have both."""

import csv
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from megalith.cli.data import app
from megalith.data.labelled import Labels, prepare_labelled, read_labelled
from megalith.data.labelled_dataset import LabelledDataset, LabelledTexts, stack_labelled_texts
from megalith.data.special_tokens import SPECIAL_TOKENS, bert_tokens
from megalith.data.tokenizer import train_byte_level_bpe
from megalith.errors import ConfigError, DataError

ROWS = [("red as a rose", "colour"), ("one, and two", "number"), ('"three"', "number"), ("green leaves", "colour")]


@pytest.fixture
def tokenizer(tmp_path):
    made = train_byte_level_bpe(["red green one two three\n"], 300, SPECIAL_TOKENS["bert"])
    made.save(tmp_path / "tokenizer.json")
    return made


@pytest.fixture
def prefix(tokenizer, tmp_path):
    path = tmp_path / "x.csv"
    path.write_text(
        'label,text\ncolour,red as a rose\nnumber,"one, and two"\nnumber,"""three"""\ncolour,green leaves\n'
    )
    prepare_labelled(path, tmp_path / "x", tmp_path / "tokenizer.json")
    return tmp_path / "x"


def test_columns_are_taken_by_their_names_and_classes_are_sorted(prefix, tokenizer):
    texts = LabelledTexts(prefix, tokenizer, 32)
    assert texts.classes == ("colour", "number")
    special = bert_tokens(tokenizer)
    for sample, (text, label) in zip((texts[i] for i in range(4)), ROWS, strict=True):
        assert sample.tokens.tolist() == [special.classifier, *tokenizer.encode(text), special.separator]
        assert texts.classes[sample.label] == label


def test_tabs_need_no_quotes(tokenizer, tmp_path):
    path = tmp_path / "x.tsv"
    path.write_text('text\tlabel\nhe said "no\t0\nshe, too\t1\n')
    found = prepare_labelled(path, tmp_path / "x", tmp_path / "tokenizer.json")
    assert (found.classes, found.num_texts) == (("0", "1"), 2)
    text = LabelledTexts(tmp_path / "x", tokenizer, 32)[0].tokens[1:-1]
    assert tokenizer.decode(text.tolist()) == 'he said "no'


def test_a_text_may_be_as_long_as_it_likes(tokenizer, tmp_path):
    text = "red green " * 20_000
    (tmp_path / "long.csv").write_text(f"text,label\n{text},colour\nblue,other\n")
    before = csv.field_size_limit()
    assert read_labelled(tmp_path / "long.csv").texts[0] == text
    assert csv.field_size_limit() == before < len(text)


def test_held_out_texts_are_read_before_anything_is_written(prefix, tokenizer, tmp_path):
    (tmp_path / "valid.csv").write_text("text,label\nloud,sound\n")
    arguments = [tmp_path / "x.csv", "--valid", tmp_path / "valid.csv", "--out", tmp_path / "y"]
    arguments += ["--tokenizer", tmp_path / "tokenizer.json"]
    done = CliRunner().invoke(app, ["label", *map(str, arguments)])
    assert "got 'sound'" in str(done.exception)
    assert not list(tmp_path.glob("y*"))


def test_every_epoch_has_every_text_in_an_order_of_its_own(prefix, tokenizer):
    texts = LabelledTexts(prefix, tokenizer, 32)
    dataset = LabelledDataset(texts, seed=3)
    orders = [[tuple(dataset[epoch * 4 + i].tokens.tolist()) for i in range(4)] for epoch in range(8)]
    whole = sorted(tuple(texts[i].tokens.tolist()) for i in range(4))
    assert all(sorted(order) == whole for order in orders)
    assert len({tuple(order) for order in orders}) > 2


def test_rows_are_padded_behind_their_text(prefix, tokenizer):
    texts, padding = LabelledTexts(prefix, tokenizer, 32), bert_tokens(tokenizer).padding
    batch = stack_labelled_texts([texts[0], texts[2]], [5, 9], 32, padding)
    for row, sample in enumerate((texts[0], texts[2])):
        N = len(sample.tokens)
        assert batch.num_tokens[row] == N
        assert batch.tokens[row].tolist() == [*sample.tokens.tolist(), *[padding] * (32 - N)]
    assert batch.classes.tolist() == [0, 1]
    assert batch.row_ids.tolist() == [5, 9]
    assert (batch.labels == -1).all()


def test_long_texts_are_refused_or_cut_where_it_is_asked_for(prefix, tokenizer, tmp_path):
    with pytest.raises(DataError, match=r"at most 3 tokens.*--max-tokens 3"):
        LabelledTexts(prefix, tokenizer, 5)
    longest = max(len(tokenizer.encode(text)) for text, _ in ROWS)
    assert max(len(LabelledTexts(prefix, tokenizer, longest + 2)[i].tokens) for i in range(4)) == longest + 2
    with pytest.raises(DataError, match=f"at most {longest - 1} tokens"):
        LabelledTexts(prefix, tokenizer, longest + 1)
    found = prepare_labelled(tmp_path / "x.csv", tmp_path / "cut", tmp_path / "tokenizer.json", max_tokens=3)
    assert found.num_cut == sum(len(tokenizer.encode(text)) > 3 for text, _ in ROWS)
    assert max(len(LabelledTexts(tmp_path / "cut", tokenizer, 5)[i].tokens) for i in range(4)) == 5
    with pytest.raises(ConfigError, match=r"data.seq_length must be at least 3.*got 2"):
        LabelledTexts(prefix, tokenizer, 2)
    with pytest.raises(ConfigError, match="--max-tokens must be 1 or more"):
        prepare_labelled(tmp_path / "x.csv", tmp_path / "none", tmp_path / "tokenizer.json", max_tokens=0)


BAD_FILES = [
    ("x.csv", "text,class\na,b\n", r"must name its two columns, text and label; got text, class"),
    ("x.csv", "", r"must name its two columns.*got none"),
    ("x.csv", "text,label\na,b,c\n", r"must have 2 columns; line 2 has 3; quote texts"),
    ("x.csv", "text,label\na,x\n,y\nb,\n", r"line 3 has no text\n.*line 4 has no label"),
    ("x.csv", "text,label\n", r"contains no texts"),
    ("x.csv", "text,label\na,x\nb,x\n", r"at least 2 classes; all are of 'x'"),
    ("x.csv", 'text,label\n"a,x\n', r"cannot be parsed"),
    ("x.txt", "text,label\na,x\n", r"in a .csv or .tsv file"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES)
def test_a_file_without_columns_for_texts_and_labels_is_refused(name, content, message, tokenizer, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=f"(?s){message}"):
        prepare_labelled(tmp_path / name, tmp_path / "out", tmp_path / "tokenizer.json")
    assert not list(tmp_path.glob("out*"))


def test_a_file_that_is_not_there_or_not_utf8_is_refused(tokenizer, tmp_path):
    with pytest.raises(DataError, match="cannot be read from"):
        prepare_labelled(tmp_path / "none.csv", tmp_path / "out", tmp_path / "tokenizer.json")
    (tmp_path / "x.csv").write_bytes(b"text,label\n\xff,a\n")
    with pytest.raises(DataError, match="UTF-8"):
        prepare_labelled(tmp_path / "x.csv", tmp_path / "out", tmp_path / "tokenizer.json")


def test_held_out_labels_must_be_classes_of_the_training_texts(prefix, tokenizer, tmp_path):
    (tmp_path / "valid.csv").write_text("text,label\nblue,colour\nloud,sound\n")
    with pytest.raises(DataError, match="must be one of colour, number; got 'sound'"):
        prepare_labelled(
            tmp_path / "valid.csv", tmp_path / "v", tmp_path / "tokenizer.json", classes=("colour", "number")
        )


def test_a_tokenizer_without_the_tokens_around_a_text_is_refused_before_anything_is_written(prefix, tmp_path):
    train_byte_level_bpe(["one text"], vocab_size=300).save(tmp_path / "plain.json")
    with pytest.raises(
        DataError, match=r"a tokenizer with a classifier token \(\[CLS\] or <s>\).*--special-tokens bert"
    ):
        prepare_labelled(tmp_path / "x.csv", tmp_path / "out", tmp_path / "plain.json")
    assert not list(tmp_path.glob("out*"))


def test_nothing_is_overwritten(prefix, tokenizer, tmp_path):
    before = {path.name: path.read_bytes() for path in tmp_path.glob("x*")}
    with pytest.raises(DataError, match="already"):
        prepare_labelled(tmp_path / "x.csv", tmp_path / "x", tmp_path / "tokenizer.json")
    assert {path.name: path.read_bytes() for path in tmp_path.glob("x*")} == before


def test_classes_that_do_not_fit_the_texts_are_refused(prefix, tokenizer, tmp_path):
    path = tmp_path / "x-classes.json"
    for content, message in (
        ({"classes": ["a", "b"], "labels": [0, 1]}, r"must have 4 labels, one for each text; it has 2"),
        ({"classes": ["a", "b"], "labels": [0, 1, 2, 0]}, r"must be 0 to 1; got 2"),
        ({"classes": ["a", "b"]}, r"must contain class names"),
        ({"classes": "ab", "labels": [0, 1, 1, 0]}, r"classes must be a list of names"),
        ({"classes": ["a", None], "labels": [0, 1, 1, 0]}, r"classes must be a list of names"),
        ({"classes": ["a", "a"], "labels": [0, 1, 1, 0]}, r"two classes have the same name"),
        ({"classes": ["a", "b"], "labels": [0, 0.7, 1, 0]}, r"labels must be class indices"),
        ({"classes": ["a", "b"], "labels": 3}, r"must have 4 labels, one for each text; it has 1"),
    ):
        path.write_text(json.dumps(content))
        with pytest.raises(DataError, match=message):
            LabelledTexts(prefix, tokenizer, 32)
    for empty, classes, labels in (("c", ["a", "b", "c"], [0, 1, 1, 0]), ("z", ["z", "a", "b"], [1, 2, 2, 1])):
        path.write_text(json.dumps({"classes": classes, "labels": labels}))
        with pytest.raises(DataError, match=f"'{empty}' has none"):
            LabelledDataset(LabelledTexts(prefix, tokenizer, 32), 0)
    path.unlink()
    with pytest.raises(DataError, match="megalith data label"):
        Labels.read(prefix, 4)


def test_other_labels_are_other_data(prefix, tokenizer, tmp_path):
    before = LabelledTexts(prefix, tokenizer, 32).identity()
    path = tmp_path / "x-classes.json"
    path.write_text(json.dumps({"classes": ["a", "b"], "labels": [1, 1, 1, 0]}))
    after = LabelledTexts(prefix, tokenizer, 32).identity()
    assert {name for name in before if before[name] != after[name]} == {"labels", "classes"}
    assert np.isscalar(before["labels"])
