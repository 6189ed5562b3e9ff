"""docs/fine_tuning.md: its Python block runs, and its records are accepted; test_commands runs its commands."""

import json
import re

from megalith.data.chat.encoder import ChatEncoder
from megalith.data.chat.format import ChatFormat
from megalith.data.tokenizer import Tokenizer
from tests.data.chat.examples import CHATML, tokenizer
from tests.docs.pages import page, python_blocks


def test_the_block_shows_the_tokens_of_the_answer(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    [source] = python_blocks("fine_tuning.md")
    exec(compile(source, "docs/fine_tuning.md", "exec"), {})
    ids = [int(id) for id in re.findall(r"\d+", capsys.readouterr().out)]
    assert Tokenizer.load(tmp_path / "tokenizer.json").decode(ids) == "In the drawer.<end>"


def test_the_records_are_equal():
    [block] = re.findall(r"^```json\n(.*?)^```", page("fine_tuning.md"), re.DOTALL | re.MULTILINE)
    encode = ChatEncoder(tokenizer(), ChatFormat(CHATML))
    messages, prompt = (encode(json.loads(line)) for line in block.splitlines())
    assert messages == prompt
