"""megalith generate: all sources of prompts, several samples, streamed text, and one message per mistake."""

import io
import logging
import re
import shutil
import sys
from pathlib import Path

import pytest

from megalith.cli import generate as command
from tests.program import Ended, here
from tests.training.tasks.conversion.folders import write_folder

DRAW = ["--max-new-tokens", 12, "--temperature", 1.0]


@pytest.fixture(scope="module")
def run(original, tmp_path_factory):
    return shutil.copytree(original.kept, tmp_path_factory.mktemp("copy"), dirs_exist_ok=True) / "run"


def generate(run: Path, *arguments: object) -> Ended:
    return here("generate", run, *arguments)


def with_standard_input(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_a_prompt_comes_from_the_command_line_a_file_or_standard_input(run, tmp_path, monkeypatch):
    want = generate(run, "--prompt", "Once über\n", *DRAW)
    assert want.code == 0
    assert want.out.startswith("Once über\n")
    (tmp_path / "prompt.txt").write_text("Once über\n")
    assert generate(run, "--prompt-file", tmp_path / "prompt.txt", *DRAW) == want
    with_standard_input(monkeypatch, "Once über\n".encode())
    assert generate(run, "--prompt-file", "-", *DRAW) == want


def test_several_samples_are_those_of_the_seeds_in_a_row(run):
    alone = [generate(run, "--prompt", "Once", "--seed", seed, *DRAW).out for seed in (7, 8, 9)]
    assert len(set(alone)) == 3
    found = generate(run, "--prompt", "Once", "--seed", 7, "--samples", 3, *DRAW)
    headings = [f"=== sample {number} of 3, seed {number + 6}\n" for number in (1, 2, 3)]
    assert found.out == "".join(heading + text for heading, text in zip(headings, alone, strict=True))


def test_prompts_of_a_file_are_a_batch_of_the_texts_that_each_gives_alone(run, tmp_path):
    lines = ["Once", "x", "The ships were"]
    (tmp_path / "prompts").write_text("".join(line + end for line, end in zip(lines, ["\n", "\r\n", ""], strict=True)))
    alone = [generate(run, "--prompt", line, *DRAW).out for line in lines]
    found = generate(run, "--prompts-file", tmp_path / "prompts", *DRAW)
    headings = [f"=== prompt {number} of 3, seed 0\n" for number in (1, 2, 3)]
    assert found.out == "".join(heading + text for heading, text in zip(headings, alone, strict=True))
    again = generate(run, "--prompts-file", tmp_path / "prompts", "--samples", 2, "--seed", 5, *DRAW)
    assert again.out.count("=== prompt 3 of 3, sample 2 of 2, seed 6\n") == 1
    assert again.out.endswith(generate(run, "--prompt", lines[-1], "--seed", 6, *DRAW).out)


def test_a_text_ends_before_a_stop_string_and_options_reach_the_draw(run):
    whole = generate(run, "--prompt", "Once", *DRAW).out
    stop = whole[len("Once") + 3 :][:2]
    want = whole[: whole.index(stop, len("Once"))] + "\n"
    assert generate(run, "--prompt", "Once", "--stop", "no such", "--stop", stop, *DRAW).out == want
    for option in (["--min-p", 1], ["--top-k", 1]):
        greedy = generate(run, "--prompt", "Once", "--max-new-tokens", 12, "--temperature", 0).out
        assert generate(run, "--prompt", "Once", *option, *DRAW).out == greedy
    assert generate(run, "--prompt", "Once", "--repetition-penalty", 5, *DRAW).out != whole


def test_a_folder_of_hugging_face_gives_the_text_of_the_run_that_comes_from_it(tmp_path):
    folder, imported = tmp_path / "hf", tmp_path / "run"
    write_folder(folder, "llama")
    assert here("convert", "import", folder, "--out", imported, "--no-proof").code == 0
    got = generate(folder, "--prompt", "some", *DRAW)
    assert got.code == 0, got.err
    assert got.out == generate(imported, "--prompt", "some", *DRAW).out
    elsewhere = (folder / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    without = generate(folder, "--prompt", "some", *DRAW)
    assert (without.code, without.out) == (2, "")
    assert "has no tokenizer.json; give --tokenizer PATH" in without.err
    assert generate(folder, "--prompt", "some", "--tokenizer", elsewhere, *DRAW).out == got.out


def test_nothing_is_loaded_for_a_prompt_that_does_not_fit(run, monkeypatch):
    monkeypatch.setattr("megalith.training.tasks.generation.load_model", None)
    assert "must be shorter than the model's 32 positions; got " in generate(run, "--prompt", "qx" * 40, *DRAW).err


def test_text_is_shown_as_it_is_drawn(run, monkeypatch):
    shown: list[str] = []
    monkeypatch.setattr(command, "_show", shown.append)
    whole = generate(run, "--prompt", "Once", *DRAW)
    assert whole.code == 0
    assert (shown[0], shown[-1]) == ("Once", "\n")
    assert len(shown) > 5  # 12 tokens, some of which are not a whole character
    monkeypatch.undo()
    assert generate(run, "--prompt", "Once", *DRAW).out == "".join(shown)


def test_what_takes_long_is_announced(run, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr("megalith.cli.console.Announcer.begin", lambda _, what: said.append(what))
    assert generate(run, "--prompt", "Once", *DRAW).code == 0
    assert said[0] == f"loading {run}"
    assert said[1].startswith("computing the first token; operations may be compiled")


def test_waiting_for_a_prompt_is_announced_as_that(run, tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr("megalith.cli.console.Announcer.begin", lambda _, what: said.append(what))
    (tmp_path / "prompt.txt").write_text("Once")
    assert generate(run, "--prompt-file", tmp_path / "prompt.txt", *DRAW).code == 0
    assert said[:3] == [f"loading {run}", f"reading the prompt from {tmp_path / 'prompt.txt'}", f"loading {run}"]
    with_standard_input(monkeypatch, b"Once")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert (
        generate(run, "--prompt-file", "-", *DRAW).err
        == "type the prompt, and end it with Ctrl-D on a line of its own\n"
    )


def huge(folder: Path) -> list[object]:
    (folder / "huge").write_bytes(b"a" * (2**20 + 1))
    return ["--prompt-file", folder / "huge"]


def not_utf8(folder: Path) -> list[object]:
    (folder / "latin1").write_bytes("über".encode("latin1"))
    return ["--prompt-file", folder / "latin1"]


def empty_line(folder: Path) -> list[object]:
    (folder / "prompts").write_text("one\n\ntwo\n")
    return ["--prompts-file", folder / "prompts"]


def one_long_line(folder: Path) -> list[object]:
    (folder / "prompts").write_text("one\n" + "qx" * 40)
    return ["--prompts-file", folder / "prompts"]


X = ["--prompt", "x"]
MISTAKES = {
    "no prompt": (lambda _: [], "give one of --prompt TEXT, --prompt-file PATH and --prompts-file PATH"),
    "two prompts": (lambda f: [*X, "--prompt-file", f / "x"], "give one of --prompt"),
    "two files": (lambda f: ["--prompts-file", f / "y", "--prompt-file", f / "x"], "give one of --prompt"),
    "an empty line": (empty_line, "must be a prompt; line 2 is empty; leave it out"),
    "a long prompt in a batch": (one_long_line, "must be shorter than the model's 32 positions; got "),
    "a prompts file that is not there": (
        lambda f: ["--prompts-file", f / "none"],
        "none' cannot be read: No such file",
    ),
    "an empty prompt": (lambda _: ["--prompt", ""], "the prompt is empty; give some text"),
    "a surrogate": (lambda _: ["--prompt", "a\udcff"], "must be text in UTF-8; character 1 is "),
    "a prompt longer than the positions": (
        lambda _: ["--prompt", "qx" * 40],
        "must be shorter than the model's 32 positions; got ",
    ),
    "a prompt file that is not there": (lambda f: ["--prompt-file", f / "none"], "none' cannot be read: No such file"),
    "a prompt file that is a folder": (lambda f: ["--prompt-file", f], "cannot be read: Is a directory"),
    "a prompt file with NUL in its name": (lambda _: ["--prompt-file", "a\0b"], "cannot be read: embedded null byte"),
    "a prompt file of 300 characters": (lambda _: ["--prompt-file", "a" * 300], "File name too long"),
    "a huge prompt file": (huge, "must have at most 1,048,576 bytes"),
    "a device without end": (lambda _: ["--prompt-file", "/dev/zero"], "must have at most 1,048,576 bytes"),
    "a prompt file in another encoding": (not_utf8, "must be text in UTF-8; byte 0 is not"),
    "a temperature below 0": (lambda _: [*X, "--temperature", -1], "temperature must be 0"),
    "a temperature that is no number": (lambda _: [*X, "--temperature", "nan"], "got nan"),
    "an infinite temperature": (lambda _: [*X, "--temperature", "inf"], "got inf"),
    "top_k = 0": (lambda _: [*X, "--top-k", 0], "top_k must be 1 or more"),
    "top_p that is no number": (lambda _: [*X, "--top-p", "nan"], "top_p must be in"),
    "min_p above 1": (lambda _: [*X, "--min-p", 2], "min_p must be in [0, 1]; got 2.0"),
    "a penalty of 0": (lambda _: [*X, "--repetition-penalty", 0], "repetition_penalty must be positive and finite"),
    "an empty stop string": (lambda _: [*X, "--stop", "a", "--stop", ""], "a stop string must not be empty"),
    "a negative seed": (lambda _: [*X, "--seed", -1], "the seed must be 0 or more and below 2^63"),
    "a seed that is too large": (lambda _: [*X, "--seed", 2**63], "below 2^63"),
    "a last seed that is too large": (lambda _: [*X, "--seed", 2**63 - 1, "--samples", 2], "below 2^63"),
    "a seed of 5,000 digits": (lambda _: [*X, "--seed", "9" * 5000], "--seed"),
    "a negative number of tokens": (lambda _: [*X, "--max-new-tokens", -5], "0 or more; got -5"),
    "no samples": (lambda _: [*X, "--samples", 0], "--samples must be 1 or more"),
    "an eod without its tokenizer": (lambda _: [*X, "--eod", "</s>"], "--eod names a token of --tokenizer"),
    "a tokenizer that is not there": (lambda f: [*X, "--tokenizer", f / "none"], "none must be a tokenizer.json"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_message(name, run, tmp_path):
    arguments, says = MISTAKES[name]
    found = generate(run, *arguments(tmp_path))
    assert (found.code, found.out) == (2, ""), found
    assert says in found.err, found.err
    assert "Traceback" not in found.err
    if found.err.startswith("error: "):
        assert found.err.count("\n") == 1


@pytest.mark.parametrize("prompt", [b"a\0b", b"\xef\xbb\xbfwith a byte order mark", "🙂".encode()])
def test_unusual_text_is_a_prompt(prompt, run, monkeypatch):
    with_standard_input(monkeypatch, prompt)
    found = generate(run, "--prompt-file", "-", *DRAW)
    assert found.code == 0
    assert found.out.startswith(prompt.decode("utf-8-sig"))


def test_no_new_tokens_give_the_prompt(run):
    assert generate(run, *X, "--max-new-tokens", 0).out == "x\n"


def test_a_tokenizer_with_ids_for_which_the_model_has_no_row_is_refused(run, tmp_path):
    kept = run / "tokenizer.json"
    content = kept.read_bytes()
    words = [f'{{"id": {300 + n}, "content": "<{n}>", "special": false, "single_word": false, "lstrip": false, '
             f'"rstrip": false, "normalized": false}}' for n in range(1)]  # fmt: skip
    kept.unlink()
    try:
        larger = tmp_path / "larger.json"
        larger.write_bytes(content.replace(b'"added_tokens": [', f'"added_tokens": [{words[0]},'.encode()))
        found = generate(run, *X, "--tokenizer", larger)
    finally:
        kept.write_bytes(content)
    assert found.code == 2
    assert "must have ids below 280" in found.err
    assert "280 ('<0>')" in found.err


@pytest.mark.parametrize(("shape", "more", "told"), [("llama", 24, True), ("llama", 3, False), ("gpt2", 24, False)])
def test_a_text_that_may_outgrow_the_rows_of_training_is_told_with_the_way_to_stay_within(
    shape, more, told, tmp_path, caplog
):
    write_folder(tmp_path / "source", shape)  # of 24 positions, which is gpt2's limit
    with caplog.at_level(logging.WARNING):
        found = generate(tmp_path / "source", "--prompt", "some more", "--max-new-tokens", more, "--temperature", 0)
    assert found.code == 0, found
    lines = [record.getMessage() for record in caplog.records if "trained on rows" in record.getMessage()]
    assert len(lines) == told
    for line in lines:
        found = re.match(
            r"the text may reach (\d+) tokens, but the model was trained on rows of 24, .* at most (\d+) tokens$", line
        )
        assert found is not None, line
        assert int(found[1]) - more == 24 - int(found[2])  # both are the prompt
