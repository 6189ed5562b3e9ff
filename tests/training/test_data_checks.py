"""Warnings about datasets of a run that do not quite go together; errors about them are in test_blend.py."""

from pathlib import Path
from typing import Any

import pytest

from megalith.config import RunConfig, load_run
from megalith.data.indexed_dataset import IndexedDatasetBuilder
from megalith.data.sidecar import ChatOrigin
from megalith.data.tokenizer import train_byte_level_bpe
from megalith.training import data_checks
from megalith.training.data_checks import check_beginnings, check_chat_templates
from tests.data.chat.examples import write_conversations
from tests.tiny_run import EOD, settings

BOS = 7


@pytest.fixture
def beginning(monkeypatch):
    """The tokenizer of all datasets begins texts with a token."""
    tokenizer = train_byte_level_bpe(["the cat sat " * 9], vocab_size=270).framed(begin=(BOS,))
    monkeypatch.setattr(data_checks, "tokenizer_of_data", lambda *_: tokenizer)


def run_on(folder: Path, **sets: str) -> RunConfig:
    tree: dict[str, Any] = settings(folder)
    return load_run({**tree, "data": {**tree["data"], "train": sets}})


def write_text(prefix: Path, *first: int) -> str:
    with IndexedDatasetBuilder(prefix, "uint16") as builder:
        builder.add_document([*first, 1, 2, 3, EOD])
        builder.finalize(eod=EOD)
    return str(prefix)


def write_chats(prefix: Path, template: str, *ends: int) -> str:
    return write_conversations(prefix, chat=ChatOrigin(template=template, ends=ends))


@pytest.mark.parametrize("names", [("begun", "plain"), ("plain", "begun")])
def test_texts_of_which_only_some_begin_with_bos_are_reported(names, beginning, tmp_path, caplog):
    sets = {"begun": write_text(tmp_path / "begun", BOS), "plain": write_text(tmp_path / "plain")}
    assert list(check_beginnings(run_on(tmp_path, **{name: sets[name] for name in names}))) == []
    line = f"documents of {sets['begun']} begin with the tokens [7], those of {sets['plain']} do not"
    assert [line in message for message in caplog.messages] == [True]


def test_how_conversations_begin_is_up_to_their_template(beginning, tmp_path, caplog):
    sets = {"chats": write_chats(tmp_path / "chats", "one", 3), "begun": write_text(tmp_path / "begun", BOS)}
    assert list(check_beginnings(run_on(tmp_path, **sets))) == []
    assert caplog.messages == []


@pytest.mark.parametrize(("other", "is_reported"), [("one", False), ("two", True)])
def test_another_template_is_reported_but_not_other_tokens_that_end_turns(other, is_reported, tmp_path, caplog):
    sets = {"a": write_chats(tmp_path / "a", "one", 3), "b": write_chats(tmp_path / "b", other, 3, 4)}
    assert list(check_chat_templates(run_on(tmp_path, **sets))) == []
    line = f"the conversations of {sets['a']} and {sets['b']} were made with different chat templates"
    assert [line in message for message in caplog.messages] == [True] * is_reported
