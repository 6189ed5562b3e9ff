"""Files of conversations become a dataset: formats, templates beside a tokenizer, processes, and what is held out."""

import json
from itertools import chain, pairwise

import numpy as np
import pytest
from typer.testing import CliRunner

from megalith.cli.data import app
from megalith.data.chat.encoder import ChatEncoder
from megalith.data.chat.format import ChatFormat
from megalith.data.conversations import learned_sequences
from megalith.data.indexed_dataset import IndexedDataset
from megalith.data.prepare import prepare
from megalith.data.tokenizer import Tokenizer
from megalith.errors import ConfigError, DataError, MegalithError
from tests.data.chat.examples import (
    CHATML,
    CHATS,
    INSTRUCTIONS,
    REASONING,
    TOOLS,
    TURNS,
    assistant,
    prepare_chats,
    user,
    write_lines,
    write_tokenizer,
)

RECORDS = [{"messages": chat} for chat in CHATS] + [{"prompt": "one", "completion": "two"}]


def documents(dataset: IndexedDataset) -> list[list[list[int]]]:
    """The sequences of each document."""
    return [[dataset.get(s).tolist() for s in range(a, b)] for a, b in pairwise(dataset.document_indices.tolist())]


def test_a_conversation_is_a_document_whose_sequences_are_context_and_learned(tmp_path):
    summary = prepare_chats(tmp_path, RECORDS)
    encode = ChatEncoder(Tokenizer.load(tmp_path / "tokenizer.json"), ChatFormat.find(tmp_path / "tokenizer.json"))
    dataset = IndexedDataset(summary.prefix)
    assert dataset.sidecar.conversations
    for record, sequences in zip(RECORDS, documents(dataset), strict=True):
        [chat] = encode(record)
        assert [len(sequence) for sequence in sequences] == chat.lengths
        assert list(chain.from_iterable(sequences)) == chat.tokens
    assert learned_sequences(dataset).tolist()[:3] == [False, True, False]
    assert dataset.sidecar.text_bytes == sum(encode(record)[0].num_bytes for record in RECORDS)


def test_what_begins_with_the_assistant_has_an_empty_context(tmp_path):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    write_tokenizer(tmp_path, template)
    dataset = IndexedDataset(prepare_chats(tmp_path, [{"messages": [assistant("one"), user("two")]}]).prefix)
    assert dataset.sequence_lengths[0] == 0
    assert learned_sequences(dataset).tolist() == [False, True, False]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".parquet"])
def test_every_format_gives_the_same_dataset(suffix, tmp_path):
    records = [{"messages": [*chat, {"role": "tool", "name": "add", "content": "five"}]} for chat in CHATS]
    expected = documents(IndexedDataset(prepare_chats(tmp_path, records).prefix))
    path = tmp_path / f"other{suffix}"
    if suffix == ".parquet":
        arrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(arrow.Table.from_pylist([{**record, "id": 1} for record in records]), path)
    else:
        import gzip

        content = (tmp_path / "chats.jsonl").read_bytes()
        path.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)
    chat = ChatFormat.find(tmp_path / "tokenizer.json")
    found = prepare([path], tmp_path / "other", tokenizer=tmp_path / "tokenizer.json", chat=chat)
    assert documents(IndexedDataset(found.prefix)) == expected


def test_the_bytes_are_the_same_for_any_number_of_processes_and_records_are_held_out_whole(tmp_path):
    records = [
        {"messages": [user("one two " * 400), assistant("two"), user(str(n)), assistant("x")]} for n in range(700)
    ]
    one = prepare_chats(tmp_path, records, name="a", valid=0.1, split_turns=True)
    chat = ChatFormat.find(tmp_path / "tokenizer.json", split_turns=True)
    settings = {"tokenizer": tmp_path / "tokenizer.json", "chat": chat, "valid": 0.1}
    other = tmp_path / "b"
    other.mkdir()
    (other / "a.jsonl").write_bytes((tmp_path / "a.jsonl").read_bytes())
    two = prepare([other / "a.jsonl"], other / "a", processes=2, **settings)
    for suffix in (".bin", ".idx"):
        for name in ("a", "a-valid"):
            assert (tmp_path / f"{name}{suffix}").read_bytes() == (other / f"{name}{suffix}").read_bytes()
    assert one.valid.num_documents + one.train.num_documents == 1400
    assert one.valid.num_documents % 2 == 0
    assert 0 < one.valid.num_documents < 280
    assert prepare([other / "a.jsonl"], other / "a", processes=2, **settings).was_done
    with pytest.raises(DataError, match="already exists"):
        prepare([other / "a.jsonl"], other / "a", **{**settings, "chat": ChatFormat(CHATML)})
    assert two.train == one.train.model_copy(update={"job": two.train.job, "tokenizer": two.train.tokenizer})


def test_the_template_is_found_where_transformers_finds_it(tmp_path):
    path = write_tokenizer(tmp_path, template=None)
    config = tmp_path / "tokenizer_config.json"
    assert ChatFormat.find(path).template is None
    settings = json.loads(config.read_text())
    config.write_text(json.dumps({**settings, "chat_template": TURNS, "eos_token": {"content": "<|im_end|>"}}))
    found = ChatFormat.find(path)
    assert (found.template, dict(found.tokens)) == (TURNS, {"bos_token": "<s>", "eos_token": "<|im_end|>"})
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": TOOLS}]
    config.write_text(json.dumps({**settings, "chat_template": named}))
    assert (ChatFormat.find(path).template, ChatFormat.find(path).tools_template) == (CHATML, TOOLS)
    (tmp_path / "chat_template.jinja").write_text(INSTRUCTIONS)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(TURNS)
    found = ChatFormat.find(path)
    assert (found.template, found.tools_template) == (INSTRUCTIONS, TURNS)
    (tmp_path / "mine.jinja").write_text(REASONING)
    assert ChatFormat.find(path, tmp_path / "mine.jinja").template == REASONING
    assert ChatFormat.find(path, use_template=False).template is None
    run = tmp_path / "run"  # keeps these files in a subfolder
    write_tokenizer(run, template=None)
    write_tokenizer(run / "huggingface", TURNS)
    assert ChatFormat.find(run / "tokenizer.json").template == TURNS


def test_the_template_is_that_of_transformers_for_a_saved_tokenizer(tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(write_tokenizer(tmp_path / "a", template=None).parent)
    theirs.chat_template = {"default": CHATML, "tool_use": TOOLS}
    theirs.save_pretrained(tmp_path / "b")
    found = ChatFormat.find(tmp_path / "b" / "tokenizer.json")
    assert (found.template, found.tools_template) == (CHATML, TOOLS)
    assert dict(found.tokens).items() <= theirs.special_tokens_map.items()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            {"chat_template": [{"name": "rag", "template": CHATML}]},
            "templates for rag, but no default; .*--chat-template",
        ),
        ({"chat_template": 5}, "chat_template in tokenizer_config.json must be a text, or a list"),
        ({"chat_template": "a \ud800"}, "chat_template in tokenizer_config.json must be a text, or a list"),
        ({"chat_template": ["default"]}, "chat_template in tokenizer_config.json must be a text, or a list"),
        ([], "must describe its chat template: .*JSON object"),
    ],
)
def test_files_that_describe_no_template_are_refused(content, says, tmp_path):
    path = write_tokenizer(tmp_path, template=None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=says):
        ChatFormat.find(path)


def test_an_error_names_the_line(tmp_path):
    with pytest.raises(DataError, match=r"chats.jsonl, line 2, must have a message of the assistant to learn"):
        prepare_chats(tmp_path, [RECORDS[0], {"messages": [user("one")]}])
    assert not (tmp_path / "chats.idx").exists()
    write_lines(tmp_path / "chats.jsonl", RECORDS)
    assert prepare_chats(tmp_path, RECORDS).num_documents == len(RECORDS)


def test_other_files_and_settings_are_refused(tmp_path):
    path = write_tokenizer(tmp_path)
    text = tmp_path / "a.txt"
    text.write_text("one")
    chat = ChatFormat.find(path)
    with pytest.raises(DataError, match=r"must be in .jsonl or .parquet files, .* got .*a.txt; convert it"):
        prepare([text], tmp_path / "a", tokenizer=path, chat=chat)
    lines = write_lines(tmp_path / "a.jsonl", RECORDS)
    for settings in ({"vocab_size": 300}, {"tokenizer": path, "split_sentences": True}):
        with pytest.raises(ConfigError, match="conversations require the tokenizer of the model, and cannot be split"):
            prepare([lines], tmp_path / "a", chat=chat, **settings)
    for template, says in ((tmp_path / "none", "cannot be read: No such file"), (tmp_path, "cannot be read: Is a dir")):
        with pytest.raises(MegalithError, match=says):
            ChatFormat.find(path, template)
    (tmp_path / "latin.jinja").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"latin.jinja must be a Jinja template in UTF-8"):
        ChatFormat.find(path, tmp_path / "latin.jinja")


def test_the_command_says_how_much_is_learned_and_inspect_shows_the_rest_in_brackets(tmp_path):
    write_tokenizer(tmp_path)
    lines = write_lines(tmp_path / "a.jsonl", RECORDS)
    arguments = ["chat", str(lines), "--out", str(tmp_path / "a"), "--tokenizer", str(tmp_path), "--processes", "1"]
    found = CliRunner().invoke(app, arguments, catch_exceptions=False)
    dataset = IndexedDataset(tmp_path / "a")
    num_learned = dataset.sequence_lengths[learned_sequences(dataset)].sum()
    assert f"learned   {num_learned} tokens, {num_learned / dataset.num_tokens:.1%} of the training set" in found.output
    assert f"next: megalith train --from MODEL data.train={tmp_path / 'a'}" in found.output
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "a"), "--documents", "2"]).output
    assert (
        "  | [<|im_start|>user\n  | How are you?<|im_end|>\n  | <|im_start|>assistant\n  | ]I am fine.<|im_end|>"
        in shown
    )
    assert "  | ]two\n  | <|im_end|>\n  | [<|im_start|>user\n  | three ü<|im_end|>" in shown


def test_without_the_template_a_prompt_and_its_completion_are_plain(tmp_path):
    write_tokenizer(tmp_path)
    found = prepare_chats(tmp_path, [{"prompt": "one ", "completion": "two"}], use_template=False)
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    assert tokenizer.decode(IndexedDataset(found.prefix).tokens.tolist()) == "one two<|endoftext|>"
    lines = write_lines(tmp_path / "b.jsonl", RECORDS)
    arguments = ["chat", str(lines), "--out", str(tmp_path / "b"), "--tokenizer", str(tmp_path), "--no-chat-template"]
    assert "line 1, has messages, but the model has no chat template" in str(
        CliRunner().invoke(app, arguments).exception
    )
    both = CliRunner().invoke(app, [*arguments, "--split-turns"]).exception
    assert "--no-chat-template leaves --chat-template and --split-turns without effect" in str(both)


def test_megatron_reads_the_dataset(tmp_path):
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    ours = IndexedDataset(prepare_chats(tmp_path, RECORDS).prefix)
    theirs = indexed.IndexedDataset(str(tmp_path / "chats"))
    assert theirs.document_indices.tolist() == ours.document_indices.tolist()
    assert all(np.array_equal(theirs[s], ours.get(s)) for s in range(len(ours)))
