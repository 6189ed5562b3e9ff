"""compiling: a run on a CPU compiles its fused operations if it is long enough, and keeps that choice when resumed."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from megalith.config import dump_yaml, load_run
from megalith.errors import ConfigError
from megalith.fusions.core import dispatch
from megalith.observe.metrics import read_metrics
from megalith.training import compiling
from megalith.training.compiling import compiling_pays, with_compiling_decided
from megalith.training.inference import evaluate_checkpoint
from megalith.training.preflight import preflight
from megalith.training.pretrain import pretrain
from tests.rank_pool import ranks
from tests.tiny_run import settings


def run(recipe="llama-4m", *overrides):
    return load_run(recipe, ["data.train=none", *overrides])


@pytest.mark.parametrize(
    ("recipe", "overrides", "world_size", "pays"),
    [
        # measured: saves 0.2 s of one core in a step of 4,096 tokens, so it takes 500 steps to make up for 100 s
        ("llama-4m", ["precision.dtype=bfloat16", "train.steps=400"], 1, False),
        ("llama-4m", ["precision.dtype=bfloat16", "train.steps=700"], 1, True),
        ("llama-4m", ["precision.dtype=float16", "train.steps=700"], 1, True),
        ("llama-4m", ["precision.dtype=bfloat16", "train.steps=700"], 2, False),
        ("llama-4m", [], 1, False),
        ("llama-4m", ["train.steps=1500"], 1, False),
        ("llama-4m", ["train.steps=3000"], 1, True),
        ("llama-4m", ["precision.dtype=float64", "train.steps=1000000", "model.hidden_dropout=0.1"], 1, False),
        ("llama-4m", ["train.steps=400", "model.hidden_dropout=0.1"], 1, True),
        ("llama-4m", ["train.steps=100", "model.hidden_dropout=0.1"], 1, False),
        ("llama-28m", [], 8, True),
        # exact GELU: 0.1 s of one core in a step of 2,048 tokens
        ("bert-tiny", [], 1, True),
        ("bert-tiny", ["model.activation=gelu_tanh"], 1, False),
        ("bert-tiny", ["train.steps=700"], 1, False),
        ("bert-tiny", ["precision.dtype=float64"], 1, False),
        # in 16 bits exact GELU is torch's operator, as ReLU is in every dtype
        ("bert-tiny", ["precision.dtype=bfloat16", "train.steps=2500"], 1, False),
        ("bert-tiny", ["precision.dtype=float16", "train.steps=2500"], 1, False),
        ("bert-tiny", ["precision.dtype=float16", "train.steps=3500"], 1, True),
        ("bert-tiny", ["precision.dtype=bfloat16", "train.steps=2500", "model.activation=gelu_tanh"], 1, True),
        ("bert-tiny", ["precision.dtype=bfloat16", "train.steps=2500", "model.activation=relu"], 1, False),
        ("t5-tiny", ["train.steps=1200"], 1, False),
        ("t5-tiny", ["train.steps=1200", "model.activation=geglu"], 1, True),
    ],
)
def test_a_run_compiles_where_what_it_saves_is_well_above_the_wait(recipe, overrides, world_size, pays):
    assert compiling_pays(run(recipe, *overrides), world_size) == pays


def test_a_decision_of_the_user_stands(tmp_path):
    for given in (False, True):
        config = run("llama-28m", f"train.compile_fusions={str(given).lower()}", f"run={tmp_path}")
        assert with_compiling_decided(config, 1) is config


@pytest.mark.parametrize("begun", [False, True])
def test_a_run_goes_on_as_it_has_begun_whatever_its_new_length(begun, tmp_path):
    changes = ["precision.dtype=bfloat16", f"run={tmp_path}"]
    before = run("llama-4m", *changes, f"train.compile_fusions={str(begun).lower()}")
    (tmp_path / "config.yaml").write_text(dump_yaml(before))
    for steps in (50, 100_000):
        config = with_compiling_decided(run("llama-4m", *changes, f"train.steps={steps}"), 1)
        assert config.train.compile_fusions == begun
    # in another dtype the numbers differ anyway
    assert with_compiling_decided(run("llama-4m", f"run={tmp_path}"), 1).train.compile_fusions is False


def test_a_folder_whose_settings_cannot_be_read_says_nothing(tmp_path):
    (tmp_path / "config.yaml").write_text("train: [")
    assert with_compiling_decided(run("llama-28m", f"run={tmp_path}"), 1).train.compile_fusions is True


def test_where_nothing_can_be_compiled_nothing_is(tmp_path, monkeypatch):
    config = run("llama-28m", f"run={tmp_path}")
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert with_compiling_decided(config, 1).train.compile_fusions is False
    monkeypatch.delenv("TORCH_COMPILE_DISABLE")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert with_compiling_decided(config, 1).train.compile_fusions is False
    with pytest.raises(ConfigError, match=r"train.compile_fusions=true needs a C\+\+ compiler .* no-such-compiler"):
        preflight("llama-4m", ["train.compile_fusions=true", f"run={tmp_path}"], 1)


def test_a_gpu_has_kernels_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "choose_device", lambda: torch.device("cuda"))
    config = run("llama-28m", f"run={tmp_path}")
    assert with_compiling_decided(config, 1) is config


def train_and_evaluate(tree):
    with patch.object(dispatch, "LARGEST_WHOLE", 0):  # so that tensors as small as these count as large enough
        pretrain(preflight(tree, [], 1), str, str)
        with patch.object(dispatch, "why_not_compile", lambda: pytest.fail("evaluation asks for a compiler")):
            evaluate_checkpoint(tree["run"], tree["data"]["train"], 2)


def test_a_short_run_and_its_evaluation_wait_for_no_compiler(tmp_path):
    tree = settings(tmp_path, train={"steps": 1}, precision={"dtype": "float32"})
    ranks(1, train_and_evaluate, tree)
    [record] = [record for record in read_metrics(Path(tree["run"])) if "loss" in record]
    assert "compile" not in record["time"]
