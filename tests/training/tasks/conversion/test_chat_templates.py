"""Named chat templates, which have their own folder, through import, run and export; and refusals."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megalith.data.companions import read_companions
from megalith.errors import CheckpointError, MegalithError
from megalith.storage import LocalStore, open_store
from megalith.training.kept import keep, kept_companions, kept_tokenizer
from megalith.training.tasks.conversion import export_model, import_model
from tests.program import here
from tests.training.tasks.conversion.folders import write_folder

transformers = pytest.importorskip("transformers")

FOLDER = "additional_chat_templates"
TEMPLATES = {"default": "plain {{ messages[0].content }}", "rag": "rag {{ 'ü' }}", "tool use.2": "tools {{ 1 + 1 }}"}
MESSAGES = [{"role": "user", "content": "some words"}]
SPOKEN = {"default": "plain some words", "rag": "rag ü", "tool use.2": "tools 2"}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A Llama whose tokenizer transformers has saved with three templates."""
    folder = tmp_path_factory.mktemp("source") / "hf"
    write_folder(folder, "llama")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|endoftext|>", model_max_length=20
    )
    tokenizer.chat_template = TEMPLATES
    tokenizer.save_pretrained(folder)
    assert {path.name for path in (folder / FOLDER).iterdir()} == {"rag.jinja", "tool use.2.jinja"}
    return folder


def spoken(folder: Path) -> dict[str, str]:
    """MESSAGES rendered with each template of the tokenizer that transformers loads."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return {
        name: tokenizer.apply_chat_template(MESSAGES, chat_template=name, tokenize=False)
        for name in tokenizer.chat_template
    }


def test_templates_with_names_come_out_of_an_imported_run(source, tmp_path):
    import_model(source, tmp_path / "run", with_proof=False)
    export_model(tmp_path / "run", tmp_path / "out", with_proof=False)
    assert spoken(source) == spoken(tmp_path / "out") == SPOKEN


def test_templates_with_names_come_out_of_a_run_that_began_from_the_folder_and_went_on(source, tmp_path):
    (tmp_path / "words.txt").write_text("some words to merge, some more words. " * 40)
    prepared = ["data", "prepare", tmp_path / "words.txt", "--out", tmp_path / "text"]
    assert here(*prepared, "--tokenizer", source / "tokenizer.json", "--eod", "<|endoftext|>").code == 0
    few = (f"run={tmp_path / 'run'}", "train.steps=1", "train.global_batch_size=1")
    found = here("train", "--from", source, f"data.train={tmp_path / 'text'}", *few, "data.seq_length=24")
    assert found.code == 0, found
    assert here("train", tmp_path / "run", "train.steps=2").code == 0
    export_model(tmp_path / "run", tmp_path / "out", with_proof=False)
    assert spoken(tmp_path / "out") == SPOKEN


def test_templates_of_an_earlier_run_are_removed(source, tmp_path):
    import_model(source, tmp_path / "run", with_proof=False)
    store = open_store(tmp_path / "run")
    kept = {name: content for name, content in kept_companions(store).items() if name != f"{FOLDER}/rag.jinja"}
    keep(tmp_path / "run", kept_tokenizer(store), kept)
    assert kept_companions(store) == kept
    keep(tmp_path / "run", kept_tokenizer(store), {})
    assert kept_companions(store) == {}


def test_a_model_max_length_stays_what_it_was_and_a_line_says_so_where_rows_are_longer(source, tmp_path, caplog):
    caplog.set_level("INFO", logger="megalith")
    assert json.loads((source / "tokenizer_config.json").read_text())["model_max_length"] == 20
    import_model(source, tmp_path / "run", with_proof=False)
    export_model(tmp_path / "run", tmp_path / "out", with_proof=False)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").model_max_length == 20
    assert "keeps model_max_length=20, but the model has 24 positions" in caplog.text
    caplog.clear()
    path = tmp_path / "run" / "huggingface" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": 24}))
    export_model(tmp_path / "run", tmp_path / "again", with_proof=False)
    assert "model_max_length" not in caplog.text


def bare(folder: Path) -> LocalStore:
    """A folder with valid templates and nothing else."""
    (folder / "hf" / FOLDER).mkdir(parents=True)
    (folder / "hf" / "chat_template.jinja").write_text(TEMPLATES["default"])
    (folder / "hf" / FOLDER / "rag.jinja").write_text(TEMPLATES["rag"])
    (folder / "secret").write_text("a key")
    assert read_companions(LocalStore(folder / "hf")).keys() == {"chat_template.jinja", f"{FOLDER}/rag.jinja"}
    return LocalStore(folder / "hf")


def too_many(folder: Path) -> None:
    for number in range(64):
        (folder / FOLDER / f"{number}.jinja").touch()


def large(folder: Path) -> None:
    for number in range(2):
        (folder / FOLDER / f"{number}.jinja").write_bytes(b" " * (1 << 23))


def instead(name: str, make: Any) -> Any:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return change


def all_of_them_elsewhere(folder: Path) -> None:
    (folder / FOLDER).rename(folder.parent / "elsewhere")
    (folder / FOLDER).symlink_to(folder.parent / "elsewhere")


RAG = f"{FOLDER}/rag.jinja"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (instead("chat_template.jinja", lambda path: path.write_bytes(b"\xff\xfea")), r"hf/chat_template\.jinja must"),
        (instead(RAG, lambda path: path.write_bytes(b"\xff")), r"rag\.jinja must be UTF-8 text"),
        (instead(RAG, lambda path: path.symlink_to("../../secret")), r"rag\.jinja .* it is a link to .*/secret"),
        (instead("chat_template.jinja", lambda path: path.symlink_to("../secret")), "it is a link to .*/secret"),
        (all_of_them_elsewhere, r"rag\.jinja .* it is a link to .*/elsewhere/rag\.jinja"),
        (instead(RAG, lambda path: path.symlink_to("/dev/zero")), r"rag\.jinja: it is a device"),
        (instead(RAG, os.mkfifo), r"rag\.jinja: it is a FIFO"),
        (instead(RAG, os.mkdir), r"rag\.jinja: Is a directory"),
        (instead(RAG, lambda path: path.symlink_to("rag.jinja")), r"rag\.jinja: Too many levels"),
        (lambda folder: (folder / FOLDER / "a\nb.jinja").touch(), r"unprintable name: 'a\\nb\.jinja'"),
        (too_many, "has 65 templates of .*; the limit is 64 templates of 16,777,216 bytes in total"),
        (large, r"has 3 templates of at least 16,777,\d+ bytes"),
    ],
)  # fmt: skip
def test_what_is_no_template_of_the_folder_is_refused_by_name(change, said, tmp_path):
    store = bare(tmp_path)
    change(store.path)
    with pytest.raises(MegalithError, match=said):
        read_companions(store)


def test_a_link_to_another_file_of_the_folder_and_those_of_a_cache_are_followed(tmp_path):
    store = bare(tmp_path)
    (store.path / FOLDER / "other.jinja").symlink_to("rag.jinja")
    assert read_companions(store)[f"{FOLDER}/other.jinja"].decode() == TEMPLATES["rag"]
    # as huggingface_hub lays it out
    (tmp_path / "models--a--b" / "blobs").mkdir(parents=True)
    blob = tmp_path / "models--a--b" / "blobs" / "0f3c"
    blob.write_text("of a blob")
    snapshot = tmp_path / "models--a--b" / "snapshots" / "77aa"
    (snapshot / FOLDER).mkdir(parents=True)
    (snapshot / FOLDER / "rag.jinja").symlink_to("../../../blobs/0f3c")
    (snapshot / "chat_template.jinja").symlink_to("../../blobs/0f3c")
    found = read_companions(LocalStore(snapshot))
    assert found == dict.fromkeys(("chat_template.jinja", f"{FOLDER}/rag.jinja"), b"of a blob")
    (snapshot / "chat_template.jinja").unlink()
    (snapshot / "chat_template.jinja").symlink_to("../../../secret")
    with pytest.raises(CheckpointError, match=r"link to .*/secret; copy that file here"):
        read_companions(LocalStore(snapshot))
