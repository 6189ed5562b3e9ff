"""docs/as_a_library.md: every block runs, and the script for four ranks trains like one process."""

import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megalith.acceleration import full_cuda_graph
from megalith.numerics.tolerance import LAYOUT_FLOAT64
from megalith.training import pretrain as pretrain_module
from megalith.training.loop import Outcome
from megalith.training.run import Run
from megalith.training.setup import build_run
from tests.acceleration.operator_recorder import OperatorRecorder
from tests.docs.pages import python_blocks
from tests.rank_pool import ranks
from tests.tiny_run import write_dataset

SCRIPT, RESUME, FUSIONS, NOTEBOOK, GRAPH, PLUGINS = python_blocks("as_a_library.md")
STEPS = 6


@dataclass
class Trained:
    """What a script has printed and computed: the loss of each step, and its unsharded tensors."""

    losses: list[float]
    weights: dict[str, Tensor]


def run(source: str, folder: Path) -> dict[str, Any]:
    """Executes ``source`` as a file in ``folder``; returns its names and, as "printed", its output."""
    names: dict[str, Any] = {"__name__": "__main__"}
    output = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(output):
        exec(compile(source, "docs/as_a_library.md", "exec"), names)
    return {**names, "printed": output.getvalue()}


def trained(source: str, folder: Path) -> Trained:
    """The result of a multi-rank script on this rank."""
    names = run(source, folder)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", names["printed"])]
    weights = {name: _whole(parameter) for name, parameter in names["model"].named_parameters()}
    return Trained(losses, weights)


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def changed(source: str, *changes: tuple[str, str]) -> str:
    """``source`` with each text replaced; each must occur exactly once."""
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


def script(*, steps: int = STEPS, resumes: bool = False, alone: bool = False) -> str:
    """The page's script in float64, with all digits of its losses."""
    source = changed(SCRIPT, ("torch.float32, 20,", f"torch.float64, {steps},"), (":.6f}", ":.17g}"))
    if alone:
        source = changed(source, ("RankGrid(4, tensor=2)", "RankGrid(1)"))
    if resumes:
        loop = "    for step in range(STEPS):\n"
        imports = "from megalith.checkpoint import find_checkpoint, load_tensors, read_state\n"
        source = imports + changed(source, (loop, RESUME + loop.replace("STEPS", "first, STEPS")))
    return source


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Trained:
    """All steps on one process."""
    [found] = ranks(1, trained, script(alone=True), tmp_path_factory.mktemp("alone"))
    assert len(found.losses) == STEPS
    assert found.losses[-1] < found.losses[0]
    return found


def differences(found: Trained, want: Trained) -> list[str]:
    """The steps and weights in which two runs differ."""
    assert len(found.losses) == len(want.losses)
    assert found.weights.keys() == want.weights.keys()
    pairs = zip(found.losses, want.losses, strict=True)
    steps = [f"loss {i}" for i, (a, b) in enumerate(pairs) if abs(a - b) > LAYOUT_FLOAT64 * abs(b)]
    bounds = {name: LAYOUT_FLOAT64 * weight.norm() for name, weight in want.weights.items()}
    return steps + [name for name, bound in bounds.items() if (found.weights[name] - want.weights[name]).norm() > bound]


def test_the_script_has_at_most_60_lines():
    assert len(SCRIPT.splitlines()) <= 60
    assert len(FUSIONS.splitlines()) <= 10


def test_the_script_trains_on_four_ranks_as_on_one(straight, tmp_path):
    for found in ranks(4, trained, script(), tmp_path):
        assert differences(found, straight) == []


@pytest.mark.parametrize(
    "mistake",
    [
        (".sum().double() * groups.speaks_for_tokens", ".sum().double()"),  # every rank of tp counts its tokens
        ("dist.all_reduce(count)", "count = (labels != PAD).sum() * 2.0"),  # a rank divides by its own count
        ('[groups.rank("dp")]', "[dist.get_rank() % 2]"),  # ranks of tp read different rows
    ],
)
def test_the_comparison_notices_a_mistake(mistake, straight, tmp_path):
    found = ranks(4, trained, changed(script(), mistake), tmp_path)
    assert any(differences(each, straight) for each in found)


def test_the_script_resumes_in_another_layout(straight, tmp_path):
    ranks(4, trained, script(steps=STEPS // 2), tmp_path)
    [found] = ranks(1, trained, script(resumes=True, alone=True), tmp_path)
    assert len(found.losses) == STEPS - STEPS // 2
    assert differences(found, Trained(straight.losses[STEPS // 2 :], straight.weights)) == []


def test_the_fusions_are_what_torch_computes(tmp_path):
    names = run(FUSIONS, tmp_path)
    x, weight, gate, up = (names[name].detach().requires_grad_() for name in ("x", "weight", "w_gate", "w_up"))
    normed = nn.functional.rms_norm(x, (64,), weight, 1e-6)
    hidden = nn.functional.silu(normed @ gate.t()) * (normed @ up.t())
    torch.testing.assert_close(names["hidden"], hidden, rtol=1e-4, atol=1e-3)  # sums of 64 products in float32
    assert names["losses"].shape == (32, 2)
    assert all(names[name].grad.isfinite().all() for name in ("x", "weight", "w_gate", "w_up"))


def test_the_iteration_trains_whether_or_not_it_is_captured(tmp_path, monkeypatch):
    eager = run(GRAPH, tmp_path)
    assert eager["loss"] < 3.0  # ln 101 = 4.6 at first
    monkeypatch.setattr(full_cuda_graph, "_recorder_on", lambda device: OperatorRecorder())
    captured = run(GRAPH, tmp_path)
    assert captured["iteration"].is_captured
    assert captured["loss"] == eager["loss"]


def test_the_notebook_makes_logits_losses_gradients_and_tokens(tmp_path):
    names = run(NOTEBOOK, tmp_path)
    logits, losses, tokens = names["logits"], names["losses"], names["tokens"]
    want = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
    torch.testing.assert_close(losses, want)
    assert all(parameter.grad is not None for parameter in names["model"].parameters())
    assert [len(text) for text in names["continuations"]] == [8, 8]


def plugged(folder: Path) -> tuple[Outcome, int, set[str]]:
    """How the last block of the page ends, after how many steps, and which of its own parts are in the run."""
    runs: list[Run] = []

    def built(*args: Any) -> Run:
        runs.append(build_run(*args))
        return runs[-1]

    with patch.object(pretrain_module, "build_run", built):
        names = run(PLUGINS, folder)
    [run_] = runs
    parts = {type(module).__name__ for module in run_.chunks[0].modules()}
    parts.add(type(run_.optimizer.torch_optimizer).__name__)
    assert 0.0 < names["held_out"].loss < 20.0
    return names["outcome"], run_.state.step, parts


def test_own_parts_train_a_run(tmp_path):
    (tmp_path / "data").mkdir()
    write_dataset(tmp_path / "data" / "mine")
    [(outcome, step, parts)] = ranks(1, plugged, tmp_path)
    assert (outcome, step) == (Outcome.DONE, 4)
    assert {"SquaredReLU", "RMSprop"} <= parts
    assert "MLP" not in parts
    for name in ("config.yaml", "metrics.jsonl", "checkpoints/step-00000004/manifest.json"):
        assert (tmp_path / "runs/squared-relu" / name).exists()
