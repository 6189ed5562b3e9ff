"""Tokens that begin and end a text, and the files next to a tokenizer, through import, run and export."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import processors

from megalith.config import load_run
from megalith.data.indexed_dataset import IndexedDataset
from megalith.data.tokenizer import Tokenizer
from megalith.errors import CheckpointError, ConfigError
from megalith.storage import open_store
from megalith.training.kept import kept_companions, kept_tokenizer
from megalith.training.run_tokenizer import load_tokenizer
from megalith.training.tasks.conversion import export_model, import_model
from megalith.training.tasks.generation import TextSource
from megalith.training.tasks.text_scores import TextScorer
from tests.program import here
from tests.training.tasks.conversion.folders import write_folder

transformers = pytest.importorskip("transformers")

TEMPLATE = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"
END, USER, BEGIN = 255, 254, 253  # bytes of the tokenizer that no text here contains
COMPANIONS = {"tokenizer_config.json", "chat_template.jinja", "generation_config.json"}
GENERATION = {"temperature": 0.6, "top_p": 0.9, "do_sample": True, "eos_token_id": [0, END]}


def chat_folder(folder: Path) -> None:
    """A Llama whose tokenizer begins every text with a token, and has two end tokens."""
    write_folder(folder, "llama")
    path = folder / "tokenizer.json"
    made = tokenizers.Tokenizer.from_file(str(path))
    for name, id in (("<s>", BEGIN), ("<|user|>", USER), ("<|end|>", END)):
        content = json.loads(made.to_str())
        [old] = [text for text, number in content["model"]["vocab"].items() if number == id]
        del content["model"]["vocab"][old]
        content["model"]["vocab"][name] = id
        content["model"]["merges"] = [m for m in content["model"]["merges"] if old not in "".join(m)]
        made = tokenizers.Tokenizer.from_str(json.dumps(content))
    made.add_special_tokens(["<s>", "<|user|>", "<|end|>"])
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", BEGIN)])
    made.save(str(path))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|end|>",
        "auto_map": {"AutoTokenizer": ["code.Mine", None]},
        "model_max_length": 24,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "hf"
    chat_folder(folder)
    return folder


@pytest.fixture(scope="module")
def imported(chat, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("imported") / "run"
    import_model(chat, run, with_proof=False)
    return run


def test_prompts_of_a_folder_and_of_the_run_made_of_it_are_those_of_transformers(chat, imported):
    (chat.parent / "plain").mkdir(exist_ok=True)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(chat / "tokenizer.json"))
    prompts = ["some words", "<|user|>some<|end|>"]
    for source in (chat, imported):
        opened = TextSource.open(source)
        assert opened.encode(prompts, special_tokens=True) == [theirs(prompt).input_ids for prompt in prompts]
        [words, spelled] = opened.encode(prompts)
        assert words == theirs(prompts[0]).input_ids
        assert not {USER, END} & set(spelled)
        assert opened.tokenizer.ends == (0, END)


def test_a_special_token_beyond_the_models_rows_is_refused_by_its_name(chat):
    opened = TextSource.open(chat)
    with pytest.raises(ConfigError, match=r"contains '<\|end\|>', token 255, but the model only has ids below 255"):
        replace(opened, config=opened.config.model_copy(update={"vocab_size": END})).encode(
            ["q<|end|>"], special_tokens=True
        )


def test_what_is_scored_begins_as_a_document_does(chat):
    scorer = TextScorer.load(chat)
    encode = scorer.tokenizer.encode
    assert scorer.encode("some", " words") == ([BEGIN, *encode("some")], encode("some words")[len(encode("some")) :])
    assert scorer.encode("", "some") == ([BEGIN], encode("some"))


def test_a_folder_that_was_imported_goes_out_with_all_that_stood_beside_its_tokenizer(chat, imported, tmp_path):
    export_model(imported, tmp_path / "out", with_proof=False)
    theirs, ours = (
        transformers.AutoTokenizer.from_pretrained(folder) for folder in (chat_without_code(chat), tmp_path / "out")
    )
    messages = [{"role": "user", "content": "some words"}]
    want = theirs.apply_chat_template(messages, tokenize=False)
    assert ours.apply_chat_template(messages, tokenize=False) == want == "<|user|>some words<|end|>"
    assert (ours.bos_token, ours.eos_token, ours("some").input_ids) == ("<s>", "<|end|>", theirs("some").input_ids)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (model.config.eos_token_id, model.config.bos_token_id) == ([0, END], BEGIN)
    generation = model.generation_config.to_dict()
    assert {name: generation[name] for name in GENERATION} == GENERATION
    assert import_ends(tmp_path) == (0, END)
    assert "auto_map" not in (tmp_path / "out" / "tokenizer_config.json").read_text()


def chat_without_code(chat: Path) -> Path:
    folder = chat.parent / "without code"
    if not folder.exists():
        chat_folder(folder)
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text())
        del config["auto_map"]
        path.write_text(json.dumps(config))
    return folder


def import_ends(folder: Path) -> tuple[int, ...]:
    import_model(folder / "out", folder / "back", with_proof=False)
    kept = kept_tokenizer(open_store(folder / "back"))
    assert kept is not None
    return kept.ends


@pytest.mark.parametrize("bos", [True, False])
def test_a_run_that_begins_from_the_folder_keeps_them_and_begins_texts_as_its_documents_do(bos, chat, tmp_path, caplog):
    (tmp_path / "words.txt").write_text("some words to merge, some more words. " * 40)
    prepared = ["data", "prepare", tmp_path / "words.txt", "--out", tmp_path / "text"]
    prepared += ["--tokenizer", chat / "tokenizer.json", "--eod", "<|endoftext|>"]
    assert here(*prepared, *([] if bos else ["--no-bos"])).code == 0
    assert (IndexedDataset(tmp_path / "text").tokens[0] == BEGIN) == bos
    run = tmp_path / "run"
    found = here(
        "train", "--from", chat, f"data.train={tmp_path / 'text'}", f"run={run}", "train.steps=1",
        "train.global_batch_size=1", "data.seq_length=24",
    )  # fmt: skip
    assert found.code == 0, found
    assert ("begins every text with '<s>'" in caplog.text) == (not bos)
    kept = kept_tokenizer(open_store(run))
    assert kept is not None
    assert (kept.begin, kept.ends) == ((BEGIN,) if bos else (), (0, END))
    assert kept_companions(open_store(run))["chat_template.jinja"].decode() == TEMPLATE
    # a run continues with what it has, wherever the folder is, and every rank ends its samples accordingly
    assert here("train", run, "train.steps=2").code == 0
    assert kept_tokenizer(open_store(run)).ends == (0, END)
    assert load_tokenizer(load_run(run / "config.yaml")).ends == (0, END)
    # transformers begins texts the same way, whether the class follows the file or adds the token by default
    export_model(run, tmp_path / "out", with_proof=False)
    path = tmp_path / "out" / "tokenizer_config.json"
    for name in ("PreTrainedTokenizerFast", "LlamaTokenizer"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": name}))
        ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("some").input_ids
        assert (ids[0] == BEGIN) == bos
        assert name == "LlamaTokenizer" or [ids] == kept.encode_prompts(["some"])  # it splits texts differently


def test_what_a_start_that_never_saved_has_left_does_not_count(chat, tmp_path):
    (tmp_path / "words.txt").write_text("some words to merge, some more words. " * 40)
    prepared = ["data", "prepare", tmp_path / "words.txt", "--out", tmp_path / "text"]
    assert here(*prepared, "--tokenizer", chat / "tokenizer.json", "--eod", "<|endoftext|>").code == 0
    run = tmp_path / "run"
    (run / "huggingface").mkdir(parents=True)
    (run / "tokenizer.json").write_bytes((chat / "tokenizer.json").read_bytes())
    (run / "eod.json").write_text('{"id": 0, "begin": [], "ends": [0]}')
    (run / "huggingface" / "special_tokens_map.json").write_text("{}")
    settings = [f"data.train={tmp_path / 'text'}", f"run={run}", "train.steps=1", "train.global_batch_size=1"]
    assert here("train", "--from", chat, *settings, "data.seq_length=24").code == 0
    assert kept_tokenizer(open_store(run)).ends == (0, END)
    assert kept_companions(open_store(run)).keys() == COMPANIONS


def test_an_upcycled_run_keeps_what_stood_beside_the_tokenizer(chat, imported, tmp_path):
    for number, source in enumerate((chat, imported)):
        out = tmp_path / str(number)
        found = here("convert", "upcycle", source, "--out", out, "model.moe.num_experts=4", "model.moe.top_k=2")
        assert found.code == 0, found
        assert kept_companions(open_store(out)).keys() == COMPANIONS
        assert kept_tokenizer(open_store(out)).ends == (0, END)


def test_a_tokenizer_that_is_given_has_the_marks_of_the_run(imported, tmp_path):
    folder = Path(shutil.copytree(imported, tmp_path / "run"))
    (folder / "eod.json").write_text('{"id": 0, "begin": [], "ends": [0, 255]}')
    for eod, ends in ((None, (0, END)), ("<|user|>", (USER, 0, END))):
        found = TextSource.open(folder, folder / "tokenizer.json", eod).tokenizer
        assert (found.begin, found.ends) == ((), ends)


def test_ends_that_no_vocabulary_has_are_left_out(tmp_path):
    chat_folder(tmp_path / "hf")
    wild = {"eos_token_id": [0, -1, 2**31, 10**30, "x", END]}
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps(wild))
    import_model(tmp_path / "hf", tmp_path / "run", with_proof=False)
    assert kept_tokenizer(open_store(tmp_path / "run")).ends == (0, END)


@pytest.mark.parametrize(
    ("kept", "begin", "ends"),
    [({"id": 0}, (BEGIN,), (0,)), ({"id": 0, "begin": [BEGIN], "ends": [0, END]}, (BEGIN,), (0, END))],
)
def test_what_an_earlier_version_kept_is_read(kept, begin, ends, chat, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((chat / "tokenizer.json").read_bytes())
    (tmp_path / "eod.json").write_text(json.dumps(kept))
    found = kept_tokenizer(open_store(tmp_path))
    assert isinstance(found, Tokenizer)
    assert (found.begin, found.ends) == (begin, ends)  # of a model that was imported and not trained further
    (tmp_path / "metrics.jsonl").touch()
    assert kept_tokenizer(open_store(tmp_path)).begin == (begin if "begin" in kept else ())


def change(name: str, content: Any) -> Any:
    return pytest.param(name, content, id=f"{name} {content!r:.12}")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        change("tokenizer_config.json", "[1]"),
        change("tokenizer_config.json", "{"),
        change("generation_config.json", "3"),
        change("special_tokens_map.json", " " * (1 << 24) + "{}"),
        change("chat_template.jinja", "x" * ((1 << 24) + 1)),
    ],
)
def test_damaged_files_beside_the_tokenizer_are_refused_by_name(name, content, tmp_path):
    write_folder(tmp_path / "source", "llama")
    (tmp_path / "source" / name).write_text(content)
    with pytest.raises(CheckpointError, match=name):
        import_model(tmp_path / "source", tmp_path / "run", with_proof=False)
    assert not (tmp_path / "run").exists()
