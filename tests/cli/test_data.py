"""megalith data prepare: its output and exit code."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from megalith.cli.data import app
from megalith.data.indexed_dataset import IndexedDataset
from megalith.errors import DataError


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Twenty documents in a .jsonl, one of them empty, and a folder with a binary file; becomes the working folder."""
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"body": f"document {n} " * 30 if n else ""}) for n in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "x.py").write_text("x = 1\n")
    (tmp_path / "src" / "y.bin").write_bytes(b"\0")
    return ["a.jsonl", "src"]


def prepare(*arguments):
    return CliRunner().invoke(app, ["prepare", *map(str, arguments)])


def test_it_says_what_there_is_and_what_comes_next(files, tmp_path):
    command = [*files, "--out", "out/c", "--vocab-size", 270, "--valid", 0.4, "--key", "body", "--processes", 1]
    done = prepare(*command)
    assert done.exit_code == 0, done.output
    train, valid = IndexedDataset("out/c"), IndexedDataset("out/c-valid")
    assert train.num_documents + valid.num_documents == 21
    ratio = train.sidecar.text_bytes / train.num_tokens
    lines = done.stdout.splitlines()
    assert lines[0] == "done"
    assert [line.split()[0] for line in lines[1:3]] == ["training", "held"]
    assert f"{train.num_tokens:,} tokens, {ratio:.2f} bytes per token" in lines[1]
    assert "1 of them empty" in done.stdout
    assert "left out  1 binary file" in lines
    assert [line.strip().removeprefix("files     ") for line in lines[5:12]] == [
        "out/c.bin", "out/c.json", "out/c.idx", "out/c-valid.bin", "out/c-valid.json", "out/c-valid.idx",
        "out/c-tokenizer.json",
    ]  # fmt: skip
    assert lines[-1] == "next: megalith train llama-4m data.train=out/c data.valid=out/c-valid"

    again = prepare(*command)
    assert again.stdout.splitlines()[0].startswith("nothing to do")
    assert again.stdout.splitlines()[1:] == lines[1:]


@pytest.mark.parametrize(
    ("kinds", "recipe"), [(["bert"], "bert-tiny"), (["t5"], "t5-tiny"), (["t5", "bert"], "bert-tiny"), ([], "llama-4m")]
)
def test_the_next_recipe_is_one_for_the_special_tokens_and_sentences(kinds, recipe, files):
    special = [f"--special-tokens={kind}" for kind in kinds]
    command = [*files, "--vocab-size", 400, "--key", "body", "--processes", 1, *special]
    whole = prepare(*command, "--out", "whole").stdout.splitlines()
    assert whole[-1] == "next: megalith train llama-4m data.train=whole"
    assert any("to train BERT or T5, prepare with --split-sentences" in line for line in whole) == bool(kinds)
    said = f"next: megalith train {recipe} data.train=c"
    for _ in ("done", "nothing to do"):
        split = prepare(*command, "--out", "c", "--split-sentences").stdout
        assert split.splitlines()[-1] == said
        assert "--split-sentences" not in split
    given = prepare(
        *files, "--key", "body", "--out", "again", "--split-sentences", "--tokenizer", "c-tokenizer.json",
        "--processes", 1,
    )  # fmt: skip
    assert given.stdout.splitlines()[-1] == said.replace("=c", "=again")


def test_a_mistake_leaves_as_the_error_of_the_room(files):
    assert isinstance(prepare("gone.txt", "--out", "c", "--vocab-size", 270).exception, DataError)
    assert prepare(*files, "--out", "c", "--vocab-size", 270, "--processes", 0).exit_code == 2
    assert prepare(*files).exit_code == 2


def test_the_program_gives_one_message_and_exit_code_2(files):
    command = [sys.executable, "-m", "megalith", "data", "prepare", *files, "--out", "c", "--vocab-size", "270"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert "a.jsonl, line 1, must have its text under 'text'; it has 'body'; set --key" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_help_and_import_do_not_load_what_they_do_not_need():
    code = "import sys, megalith.cli.data; print({'torch', 'numpy', 'tokenizers', 'rich.progress'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
    code = "import sys, megalith.data.prepare; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_what_is_left_out_of_a_folder_or_read_as_plain_text_is_told(files, tmp_path):
    for name in ("gone", "lost"):
        (tmp_path / "src" / name).symlink_to("nowhere")
    os.mkfifo(tmp_path / "src" / "pipe")
    (tmp_path / "src" / "b.jsonl").write_text('{"text": "b"}')
    command = ["src", "--out", "c", "--vocab-size", 270, "--processes", 1]
    for _ in ("done", "nothing to do"):
        lines = prepare(*command).stdout.splitlines()
        assert "left out  1 binary file, 2 broken links, 1 pipe, socket or device" in lines
        assert "as text   1 .jsonl file in folders, each one document; give the files to read their lines" in lines
