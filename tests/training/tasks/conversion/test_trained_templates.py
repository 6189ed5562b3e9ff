"""The chat template and the end tokens of the conversations of a run go with the run and with its export."""

import json
from pathlib import Path
from typing import Any

import pytest

from megalith.data.chat.format import ChatFormat
from megalith.data.indexed_dataset import IndexedDataset
from megalith.data.tokenizer import train_byte_level_bpe
from megalith.storage import open_store
from megalith.training.kept import kept_tokenizer
from megalith.training.tasks.conversion import export_model, import_model
from tests.data.chat.examples import write_lines
from tests.program import here
from tests.training.tasks.conversion.folders import write_folder

transformers = pytest.importorskip("transformers")

OLD = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
OLD_TOOLS = "tools " + OLD
MINE = """{% for m in messages %}{{ '<u>' if m.role == 'user' else '<a>' }}{{ m.content }}<|end|>
{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"""
END = 3  # <|end|>
NAMED = [{"name": "default", "template": OLD}, {"name": "tool_use", "template": OLD_TOOLS}]
NAMED += [{"name": "rag", "template": "rag"}]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A Llama without a chat template, whose tokenizer has special tokens for one."""
    folder = tmp_path_factory.mktemp("base") / "hf"
    write_folder(folder, "llama")
    train_byte_level_bpe(["some words"] * 9, 262, ["<u>", "<a>", "<|end|>"]).save(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def with_files(base: Path, folder: Path, files: dict[str, Any]) -> Path:
    """``base``, with ``files`` beside its tokenizer; those that are not text are fields of a .json file."""
    for path in base.iterdir():
        (folder / path.name).parent.mkdir(exist_ok=True, parents=True)
        (folder / path.name).write_bytes(path.read_bytes())
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        if not isinstance(content, str):
            kept = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
            content = json.dumps({**kept, **content})
        (folder / name).write_text(content)
    return folder


def prepared(source: Path, prefix: Path, *options: str | Path) -> Path:
    chats = [{"prompt": f"w{number}", "completion": "some"} for number in range(9)]
    file = write_lines(prefix.with_suffix(".jsonl"), chats)
    found = here("data", "chat", file, "--out", prefix, "--tokenizer", source, *options)
    assert found.code == 0, found
    return prefix


def texts(source: Path, prefix: Path) -> Path:
    file = write_lines(prefix.with_suffix(".jsonl"), [{"text": "some words"}] * 40)
    assert here("data", "prepare", file, "--out", prefix, "--tokenizer", source / "tokenizer.json").code == 0
    return prefix


def trained(source: Path, data: Path | str, run: Path) -> Path:
    few = (f"run={run}", "train.steps=1", "train.global_batch_size=1", "data.seq_length=24")
    found = here("train", "--from", source, f"data.train={data}", *few)
    assert found.code == 0, found
    return run


def mine(folder: Path, template: str = MINE) -> Path:
    (folder / "mine.jinja").write_text(template)
    return folder / "mine.jinja"


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"chat_template.jinja": OLD, "additional_chat_templates/tool_use.jinja": OLD_TOOLS},
        {"chat_template.jinja": MINE, "tokenizer_config.json": {"chat_template": OLD}},
        {"tokenizer_config.json": {"chat_template": OLD}},
        {"tokenizer_config.json": {"chat_template": NAMED}},
        {"tokenizer_config.json": {"chat_template": 5}},
    ],
    ids=["none", "files", "file and setting", "setting", "named settings", "damaged setting"],
)
def test_a_run_and_its_export_have_the_template_that_made_the_data(files, base, tmp_path):
    source = with_files(base, tmp_path / "hf", files)
    data = prepared(source, tmp_path / "chats", "--chat-template", mine(tmp_path))
    run = trained(source, data, tmp_path / "run")
    assert here("train", run, "train.steps=2").code == 0
    found = ChatFormat.find(run / "tokenizer.json")
    assert (found.template, found.tools_template) == (MINE, None)
    again = prepared(run, tmp_path / "again")
    assert IndexedDataset(again).tokens.tolist() == IndexedDataset(data).tokens.tolist()
    export_model(run, tmp_path / "out", with_proof=False)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == MINE
    assert "chat_template" not in json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())


@pytest.mark.parametrize(
    ("files", "names"),
    [
        ({"chat_template.jinja": MINE, "additional_chat_templates/tool_use.jinja": OLD_TOOLS}, {"default", "tool_use"}),
        ({"chat_template.jinja": MINE, "additional_chat_templates/rag.jinja": "rag"}, {"default", "rag"}),
        (
            {"tokenizer_config.json": {"chat_template": [{"name": "default", "template": MINE}, *NAMED[1:]]}},
            {"default", "tool_use", "rag"},
        ),
    ],
)
def test_the_models_own_templates_stay(files, names, base, tmp_path):
    source = with_files(base, tmp_path / "hf", files)
    run = trained(source, prepared(source, tmp_path / "chats"), tmp_path / "run")
    export_model(run, tmp_path / "out", with_proof=False)
    theirs, ours = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (source, tmp_path / "out"))
    assert ours.chat_template == theirs.chat_template
    assert ours.chat_template.keys() == names


def test_plain_conversations_leave_the_models_template(base, tmp_path):
    source = with_files(base, tmp_path / "hf", {"chat_template.jinja": OLD})
    run = trained(source, prepared(source, tmp_path / "chats", "--no-chat-template"), tmp_path / "run")
    assert (run / "huggingface" / "chat_template.jinja").read_text() == OLD


def test_of_several_datasets_the_first_template_is_kept_and_a_warning_names_them(base, tmp_path, caplog):
    text = texts(base, tmp_path / "text")
    plain = prepared(base, tmp_path / "plain", "--no-chat-template")
    first = prepared(base, tmp_path / "first", "--chat-template", mine(tmp_path))
    other = prepared(base, tmp_path / "other", "--chat-template", mine(tmp_path, "chat: " + MINE))
    run = trained(base, f"{{text: {text}, plain: {plain}, first: {first}}}", tmp_path / "run")
    assert (run / "huggingface" / "chat_template.jinja").read_text() == MINE
    assert "different chat templates" not in caplog.text
    run = trained(base, f"{{first: {first}, other: {other}}}", tmp_path / "two")
    assert (run / "huggingface" / "chat_template.jinja").read_text() == MINE
    assert caplog.text.count(f"{first} and {other} were made with different chat templates") == 1


def test_only_conversations_record_a_template(base, tmp_path):
    text = texts(base, tmp_path / "text")
    assert "chat" not in json.loads(text.with_suffix(".json").read_text())
    chats = prepared(base, tmp_path / "chats", "--chat-template", mine(tmp_path))
    assert json.loads(chats.with_suffix(".json").read_text())["chat"]["template"] == MINE


def test_a_run_and_its_export_end_a_text_where_turns_end(base, tmp_path):
    source = with_files(base, tmp_path / "hf", {"generation_config.json": {"temperature": 0.5, "eos_token_id": [0, 2]}})
    data = prepared(source, tmp_path / "chats", "--chat-template", mine(tmp_path), "--valid", "0.3")
    for prefix in (data, tmp_path / "chats-valid"):
        assert json.loads(prefix.with_suffix(".json").read_text())["chat"]["ends"] == [END]
    run = trained(source, data, tmp_path / "run")
    assert here("train", run, "train.steps=2").code == 0
    assert json.loads((run / "eod.json").read_text())["ends"] == [0, 2, END]
    export_model(run, tmp_path / "out", with_proof=False)
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (written["eos_token_id"], written["temperature"]) == ([0, 2, END], 0.5)
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [0, 2, END]
    import_model(tmp_path / "out", tmp_path / "back", with_proof=False)
    kept = kept_tokenizer(open_store(tmp_path / "back"))
    assert kept is not None
    assert kept.ends == (0, 2, END)


def test_a_run_that_starts_from_it_on_texts_still_ends_turns(base, tmp_path):
    data = prepared(base, tmp_path / "chats", "--chat-template", mine(tmp_path))
    first = trained(base, data, tmp_path / "run")
    second = trained(first, texts(base, tmp_path / "text"), tmp_path / "second")
    kept = kept_tokenizer(open_store(second))
    assert kept is not None
    assert END in kept.ends
    assert ChatFormat.find(second / "tokenizer.json").template == MINE


def test_an_end_that_the_tokenizer_does_not_have_is_left_out(base, tmp_path):
    data = prepared(base, tmp_path / "chats", "--chat-template", mine(tmp_path))
    path = data.with_suffix(".json")
    sidecar = json.loads(path.read_text())
    sidecar["chat"]["ends"] = [10**6, END]
    path.write_text(json.dumps(sidecar))
    assert json.loads((trained(base, data, tmp_path / "run") / "eod.json").read_text())["ends"] == [0, END]


def test_generation_stops_at_the_end_of_a_turn(base, tmp_path):
    data = prepared(base, tmp_path / "chats", "--chat-template", mine(tmp_path))
    few = (f"run={tmp_path / 'run'}", "train.steps=40", "train.global_batch_size=4", "data.seq_length=24")
    assert here("train", "--from", base, f"data.train={data}", *few, "optim.lr=0.01").code == 0
    found = here(
        "generate", tmp_path / "run", "--special-tokens", "--prompt", "<u>w1<|end|>\n<a>", "--temperature", "0",
        "--max-new-tokens", "12",
    )  # fmt: skip
    assert found.code == 0, found
    assert found.out == "<u>w1<|end|>\n<a>some\n"
