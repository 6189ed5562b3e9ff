"""megalith verify: from a recipe to a verdict and an exit code; it leaves no files behind."""

import os
import signal
import time
from functools import partial
from unittest.mock import patch

import pytest
import torch.distributed as dist

from megalith.insight.verify.proof import Case
from tests.insight.verify.proofs import compare_with
from tests.program import here, start
from tests.training.test_faults import gather_without_reducing_gradients

OVERRIDES = ["parallel.tensor=2", "parallel.sequence=true", "parallel.shard=2"]
FEW = [Case({"tensor": 2, "shard": 2}, "float64", "reference"), Case({"tensor": 2}, "float64", "blocked")]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert os.listdir(tmp_path) == []
    assert not dist.is_initialized()


@pytest.fixture
def few_cases(monkeypatch):
    monkeypatch.setattr("megalith.insight.verify.verification.cases", lambda rows: FEW)


def test_a_recipe_is_proven(few_cases):
    found = here("verify", "llama-4m", *OVERRIDES)
    assert found.code == 0, found
    lines = found.out.splitlines()
    assert lines[0] == "recipe       tensor 2 x shard 2"
    assert [line.split()[0] for line in lines if line.endswith("same")] == ["4", "2"]
    assert lines[-1].startswith("all 2 runs match")
    assert "  path compile: no run used it" in lines
    assert "run 2 of 2: tensor 2, float64, blocked" in found.err


@pytest.mark.parametrize(
    ("recipe", "overrides", "degrees"),
    [
        ("bert-tiny", ["parallel.tensor=2", "parallel.sequence=true"], {"tensor": 2}),
        ("t5-tiny", ["parallel.pipeline=2"], {"pipeline": 2}),
        ("embedding-tiny", ["parallel.shard=2"], {"shard": 2}),
    ],
)
def test_the_recipes_of_encoders_are_proven(recipe, overrides, degrees, monkeypatch):
    few = [Case(degrees, "float64", "reference")]
    monkeypatch.setattr("megalith.insight.verify.verification.cases", lambda rows: few)
    found = here("verify", recipe, *overrides)
    assert found.code == 0, found
    assert found.out.splitlines()[-1].startswith("all 1 runs match")


def test_a_fault_is_named_and_the_exit_code_is_1(few_cases):
    prove = "megalith.insight.verify.proof._compare"
    with patch(prove, partial(compare_with, gather_without_reducing_gradients)):
        found = here("verify", "llama-4m", *OVERRIDES)
    assert found.code == 1, found
    *_, verdict, first = found.out.splitlines()
    assert verdict == "2 of 2 runs are wrong; smallest failing layout: tensor 2"
    assert first.startswith("first difference, in float64: the gradient of model.norm.weight in step 1, by ")


def test_a_signal_to_end_leaves_nothing_in_the_temporary_directory(tmp_path_factory, monkeypatch):
    scratch = tmp_path_factory.mktemp("scratch")
    monkeypatch.setenv("TMPDIR", str(scratch))
    program = start("verify", "llama-4m", *OVERRIDES)
    deadline = time.monotonic() + 60
    while not list(scratch.glob("megalith-verify-*/*")):  # its own folder, with something written in it
        assert program.code is None, program.ended()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    program.send_signal(signal.SIGTERM)
    assert program.ended().code == 128 + signal.SIGTERM
    assert [path.name for path in scratch.iterdir() if path.name.startswith("megalith")] == []


@pytest.mark.slow
def test_all_paths_are_proven():
    found = here("verify", "gpt2-124m", "--world", 4, "parallel.pipeline=2")
    assert found.code == 0, found
    for path in ("compile", "triton", "blocked", "aten"):
        assert f"  path {path}:" not in found.out
    assert "precision.dtype=bfloat16" in found.out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "error: give a recipe or a YAML file first"),
        (["llama-4m", "--world", 3, "parallel.tensor=2"], "parallel.tensor (2)"),
        (["llama-4m", "parallel.tensr=2"], "did you mean parallel.tensor?"),
        (["llama-4m", "--world", 0], "--world (the number of ranks) must be at least 1; got 0"),
    ],
)
def test_a_mistake_is_one_message(arguments, says):
    found = here("verify", *arguments)
    assert (found.code, found.out) == (2, "")
    assert says in found.err
