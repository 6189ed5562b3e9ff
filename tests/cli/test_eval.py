"""megalith eval: what it refuses, its progress messages, and that it prints no loss over zero tokens."""

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest

from megalith.cli.console import Console, Progress
from megalith.config import MoEConfig
from megalith.data.indexed_dataset import IndexedDatasetBuilder
from megalith.training.tasks.text_scores import TextScorer
from tests.program import here


@pytest.fixture(scope="module")
def run(original, tmp_path_factory):
    return shutil.copytree(original.kept, tmp_path_factory.mktemp("copy"), dirs_exist_ok=True) / "run"


def dataset(prefix: Path, tokens: list[int], **origin: object) -> Path:
    with IndexedDatasetBuilder(prefix, np.int32) as builder:
        builder.add_document(tokens)
        builder.finalize(**origin)
    return prefix


def questions(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


QUESTION = '{"context": "Once there", "choices": [" were", " ships"], "answer": 0}'
MISTAKES = {
    "questions and data": (
        lambda f: ["--choices", f / "q", "--data", f / "x"],
        "--choices evaluates all questions in its file; leave out --data and --samples",
    ),
    "questions that are not there": (lambda f: ["--choices", f / "q"], "cannot be read from {folder}/q: No such file"),
    "a tokenizer and data": (
        lambda f: ["--tokenizer", f / "t.json", "--data", f / "x"],
        "--tokenizer only applies to --choices, because a dataset is already tokenized; leave it out",
    ),
    "no samples": (lambda _: ["--samples", 0], "the number of samples must be 1 or more; got 0"),
    "a negative number of samples": (lambda _: ["--samples", -3], "got -3"),
    "data that are not there": (lambda f: ["--data", f / "none"], "none.idx cannot be read"),
    "one token": (lambda f: ["--data", dataset(f / "x", [1])], "must contain at least two tokens"),
    "ids beyond the vocabulary": (
        lambda f: ["--data", dataset(f / "x", [1, 2, 280])],
        "token 2 of document 0 in {folder}/x has id 280; token ids must be below 280, the model's vocabulary size; "
        "prepare the data with the model's tokenizer, or train a new model with model.vocab_size=281 or more",
    ),
    "another tokenizer": (
        lambda f: ["--data", dataset(f / "x", [1, 2, 3], tokenizer_sha256="another")],
        "prepare the text again with that one: megalith data prepare FILES... --out PREFIX --tokenizer "
        "{run}/tokenizer.json",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_message_and_no_loss(name, run, tmp_path, monkeypatch):
    monkeypatch.setattr("megalith.training.inference.load_model", None)  # reported before the model is loaded
    arguments, says = MISTAKES[name]
    found = here("eval", run, *arguments(tmp_path))
    assert (found.code, found.out) == (2, ""), found
    assert found.err.startswith("error: ")
    assert found.err.count("\n") == 1
    assert says.format(folder=tmp_path, run=run) in found.err


def test_malformed_questions_are_told_by_line_before_the_model_is_loaded(run, tmp_path, monkeypatch):
    monkeypatch.setattr("megalith.training.inference.load_model", None)
    found = here("eval", run, "--choices", questions(tmp_path / "q", QUESTION, "{", QUESTION.replace("0", "2")))
    assert (found.code, found.out) == (2, ""), found
    head, *lines = found.err.splitlines()
    wanted = '{"context": text, "choices": [text, text, ...], "answer": index}'
    assert head == f"error: each line of {tmp_path / 'q'} must be {wanted}:"
    assert lines == [
        "  line 2: it is not a JSON object in UTF-8",
        "  line 3: answer must be an integer from 0 to 1; got 2",
    ]


def test_choices_are_answered_and_a_context_that_was_cut_is_told(run, tmp_path, caplog):
    long = QUESTION.replace("Once there", "Once there were ships " * 20)
    path = questions(tmp_path / "q", QUESTION, QUESTION.replace("0", "1"), long)
    [step] = (run / "checkpoints").glob("step-*")
    for source in (run, step):
        found = here("eval", source, "--choices", path)
        assert found.code == 0, found
        [line] = found.out.splitlines()
        assert line.startswith(f"{path}: accuracy ")
        assert line.endswith("% per token, of 3 questions (guessing 50.00%)")
    assert "truncated 1 of 3 questions at the beginning, to fit the model's context of 32 tokens" in caplog.text


def test_one_line_says_that_experts_drop_tokens_among_choices(run, tmp_path, caplog, monkeypatch):
    load = TextScorer.load

    def with_capacity(*arguments):
        scorer = load(*arguments)
        moe = MoEConfig(num_experts=4, capacity={"factor": 1.25})
        scorer.model.config = scorer.model.config.model_copy(update={"moe": moe})
        return scorer

    caplog.set_level(logging.INFO)
    path = questions(tmp_path / "q", QUESTION)
    assert here("eval", run, "--choices", path).code == 0
    assert "capacity" not in caplog.text
    monkeypatch.setattr(TextScorer, "load", with_capacity)
    assert here("eval", run, "--choices", path).code == 0
    [line] = [line for line in caplog.messages if "capacity" in line]
    assert line.endswith("depends on the choices that are scored in one batch, whose tokens compete for capacity")


def test_no_perplexity_is_printed_where_no_token_has_a_loss(run, tmp_path):
    settings = run / "config.yaml"
    kept = settings.read_text()
    assert "eod_mask_loss: false" in kept
    settings.write_text(kept.replace("eod_mask_loss: false", "eod_mask_loss: true"))
    try:
        found = here("eval", run, "--data", dataset(tmp_path / "x", [0, 0, 0], eod=0))
    finally:
        settings.write_text(kept)
    assert (found.code, found.out) == (2, ""), found
    assert "x: none of the tokens read has a loss" in found.err


def test_data_of_an_unknown_tokenizer_are_evaluated_with_a_warning(run, tmp_path, caplog):
    found = here("eval", run, "--data", dataset(tmp_path / "x", [1, 2, 3]))
    assert found.code == 0, found
    assert "over 2 tokens" in found.out
    assert f"{tmp_path / 'x'} does not record its tokenizer" in caplog.text


def test_it_says_what_takes_long(run, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr("megalith.cli.console.Announcer.begin", lambda _, what: said.append(what))
    monkeypatch.setattr("megalith.cli.console._IN_FILE", 0.0)
    found = here("eval", run, "--data", run.parent / "data" / "text-valid")
    assert found.code == 0, found
    assert said[0] == f"loading {run}"
    assert said[1] == "evaluating the first samples"
    first, *_, last = found.err.splitlines()
    total = last.split()[2]
    assert first == f"2 of {total} samples"  # one micro-batch; its time does not predict that of the others
    assert last.startswith(f"{total} of {total} samples, 0 ms left")


def test_progress_comes_now_and_then_with_the_time_that_is_left(monkeypatch, capsys):
    times = iter([0.0, 100.0, 105.0, 111.0, 112.0, 131.0])
    monkeypatch.setattr("megalith.cli.console.perf_counter", lambda: next(times))
    progress = Progress(Console(), lambda done, total: f"{done:,} of {total:,} samples")
    for done in (10, 20, 40, 50, 90):
        progress(done, 100)
    # the first line after the 100 s of compiling; then one every ten seconds
    assert capsys.readouterr().out.splitlines() == [
        "10 of 100 samples",
        "40 of 100 samples, 22 s left",
        "90 of 100 samples, 3.9 s left",
    ]
