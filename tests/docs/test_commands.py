"""Runs every command in README and docs/ in an empty folder, with less text and fewer steps."""

import contextlib
import gzip
import io
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from megalith.data.tokenizer import train_byte_level_bpe
from tests.docs.pages import ROOT
from tests.program import Ended, here, start
from tests.rank_pool import ranks
from tests.training.tasks.conversion.folders import write_folder

PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
SMALLER = ["train.global_batch_size=4", "train.micro_batch_size=1", "optim.warmup_steps=0", "data.seq_length=32"]
SMALLER += ["optim.decay_steps=8"]
SMALLER_MODEL = ["model.num_layers=2", "model.hidden_size=64", "model.num_attention_heads=4"]
# text on a page -> cheaper equivalent for the test
FEWER = {
    "126": "30",
    "train.steps=2000": "train.steps=6",
    "500": "5",
    "200": "2",
    "data/other-valid": "data/mine-valid",
}
# commands that are tested elsewhere
ELSEWHERE = {
    "torchrun --nproc-per-node 4 train.py": "tests/docs/test_as_a_library.py",
    "megalith verify llama-4m parallel.tensor=2 parallel.sequence=true parallel.shard=2": "tests/cli/test_verify.py",
    "megalith verify bert-tiny parallel.tensor=2 parallel.sequence=true": "tests/cli/test_verify.py",
    "megalith verify t5-tiny parallel.pipeline=2": "tests/cli/test_verify.py",
    "megalith verify embedding-tiny parallel.shard=2": "tests/cli/test_verify.py",
    "make demo": "tests/insight/test_demo.py",
    "make test": "is what runs this",
    "make check": "CI",
    "make test-all": "by hand, into docs/test_all.md",
    "pip install megalith": "tests/test_wheel.py",
    "pip install 'megalith[report]'": "tests/test_wheel.py",
}


def commands() -> dict[str, str]:
    """Each command, without its comment, and the page that shows it, in page order."""
    found: dict[str, str] = {}
    for page in PAGES:
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text("utf-8"), re.M | re.S):
            lines = [line.split("  #")[0].strip() for line in block.splitlines()]
            if not language and re.match(r"(megalith|cat|torchrun|make|pip) ", lines[0]):
                found |= {line: page for line in lines if line not in found}
    return found


def write_texts(folder: Path) -> None:
    """Writes the files that the commands name."""
    for place in ("my_texts", "notes"):
        (folder / place).mkdir()
        for number in range(60):
            text = f"Once there were {number} ships, and each had a name. " * 8
            (folder / place / f"{number}.txt").write_text(text)
    (folder / "a.jsonl").write_text(json.dumps({"text": "Once upon a time. " * 50}) + "\n")
    with gzip.open(folder / "b.txt.gz", "wt") as file:
        file.write("Twice upon a time. " * 50)
    (folder / "chapter.txt").write_text("Once")
    (folder / "prompts.txt").write_text("Once\nTwice\n")
    shutil.copytree(ROOT / "tests/models/megatron/gpt-tp1", folder / "checkpoints" / "iter_0010000")
    words = {"Once": 0, "there": 1, "were": 2, "ships": 3, "names": 4, "</s>": 5}  # the checkpoint has 48 rows
    few = tokenizers.Tokenizer(models.WordLevel(words, unk_token="</s>"))
    few.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    few.save(str(folder / "tokenizer.json"))
    rows = [f"{'good' if number % 2 else 'bad'} ships,{'+' if number % 2 else '-'}" for number in range(12)]
    for name in ("reviews", "held_out", "more_reviews"):
        (folder / f"{name}.csv").write_text("\n".join(["text,label", *rows]))
    pairs = [{"query": f"ship {n}", "pos": ["the ship has a name"], "neg": ["no", "it has none"]} for n in range(12)]
    for name in ("pairs", "held_out_pairs"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    write_chat_model(folder / "hf" / "chat")
    chats = [{"prompt": f"w{number}", "completion": "some"} for number in range(40)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (folder / "question.txt").write_text("<u>Once</u><a>")
    question = {"context": "Once there were", "choices": [" ships", " names"], "answer": 0}
    (folder / "questions.jsonl").write_text(json.dumps(question) + "\n")


def write_chat_model(folder: Path) -> None:
    """Writes a model of Hugging Face with a chat template that is short enough for the rows of the test."""
    write_folder(folder, "llama")
    train_byte_level_bpe(["some words"] * 9, 262, ["<u>", "</u>", "<a>", "</a>"]).save(folder / "tokenizer.json")
    tag = "{% set tag = m.role[0] %}<{{ tag }}>{{ m.content }}</{{ tag }}>"
    template = "{% for m in messages %}" + tag + "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    (folder / "chat_template.jinja").write_text(template)


def here_in(folder: Path, *arguments: str) -> Ended:
    with contextlib.chdir(folder):
        return here(*arguments)


def run(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Ended:
    words = [FEWER.get(word, word) for word in shlex.split(command)]
    if words[0] == "cat":
        piped = io.TextIOWrapper(io.BytesIO((folder / words[1]).read_bytes()))
        monkeypatch.setattr(sys, "stdin", piped)
        words = words[3:]
    words = [re.sub(r"step-\d+", "step-00000004", word) for word in words]
    arguments = words[1:]
    if arguments[0] == "train" and not arguments[1].startswith("runs/"):
        arguments += [*SMALLER, "train.steps=4"]
        if arguments[1] == "embedding-tiny":  # a row holds two texts
            arguments.append("data.seq_length=64")
        if "--from" not in arguments:
            groups = 4 if arguments[1] in ("bert-tiny", "t5-tiny") else 2
            arguments += [*SMALLER_MODEL, f"model.num_query_groups={groups}"]
    elif arguments[0] == "generate" and "--max-new-tokens" not in arguments:
        arguments += ["--max-new-tokens", "5"]
    if "--nproc" not in arguments:
        return here(*arguments)
    at = arguments.index("--nproc")
    num_ranks = int(arguments[at + 1])
    if "run=runs/mine" in arguments:  # once as on the page; starting a program takes seconds
        return start(*arguments).ended()
    return ranks(num_ranks, here_in, folder, *arguments[:at], *arguments[at + 2 :])[0]


def test_each_runs_from_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path)
    for command, page in commands().items():
        if command not in ELSEWHERE:
            found = run(command, tmp_path, monkeypatch)
            assert found.code == 0, (page, command, found)
            if "generate" in command:
                assert "Once" in found.out, (page, command, found)
    for name in ("config.yaml", "metrics.jsonl", "checkpoints/step-00000004", "report.html"):
        assert (tmp_path / "runs" / "mine" / name).exists(), name


def test_what_is_held_elsewhere_is_still_shown():
    assert ELSEWHERE.keys() <= commands().keys()
