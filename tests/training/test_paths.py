"""Layouts, faults and resume are tested on every path that a run can take, not only on the reference.

float64 takes the reference, and so does every small tensor, so that test_layouts, test_faults and test_resume meet no
other path. Here operations are forced to: blocked in float64, compiled and Triton (in its interpreter) in float32, each
against the reference in float64.
"""

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.config import load_run
from megalith.fusions.core.dispatch import Backend
from megalith.numerics.tolerance import LAYOUT_FLOAT32, LAYOUT_FLOAT64, NOISE_FLOAT32, NOISE_FLOAT64, gradient_error
from megalith.observe.metrics import read_metrics
from megalith.training.pretrain import pretrain
from tests.rank_pool import ranks
from tests.tiny_run import GPT2, settings
from tests.training.paths import PATHS, first_steps_on, taking
from tests.training.reference import Trajectory, reference
from tests.training.test_faults import FAULTS, Fault

SEQUENCE = {"tensor": 2, "sequence": True}
SHARD = {"shard": 2}
CONTEXT = {"context": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {**GPT2, "ffn_hidden_size": None, "num_query_groups": None},
}
# Triton's interpreter takes about a millisecond per program of a kernel
TINY: dict[Backend, dict[str, Any]] = {
    "triton": {"model": {"num_layers": 1}, "data": {"seq_length": 8}, "train": {"global_batch_size": 4}}
}
STEPS: dict[Backend, int] = {"blocked": 3, "compile": 3, "triton": 2}
BOUNDS = {"float64": (LAYOUT_FLOAT64, NOISE_FLOAT64), "float32": (LAYOUT_FLOAT32, NOISE_FLOAT32)}
IN_MAKE_TEST = (0, 16)  # among the faults: an output of tp that is not summed, and a shard with the numbers of another
slow = pytest.mark.slow


def tree_of(folder: Path, path: Backend, shape: str, **groups: Any) -> dict[str, Any]:
    tiny = TINY.get(path, {})
    return settings(folder, **{**tiny, "model": {**SHAPES[shape], **tiny.get("model", {})}, **groups})


def apart(got: Trajectory, want: Trajectory, dtype: str) -> list[str]:
    """The losses, norms and gradients of ``got`` that differ from ``want`` by more than the dtype allows.

    A step's gradients follow from the weights that the previous steps produced. Weights themselves are not compared,
    because AdamW divides a gradient that is zero up to rounding by its own size.
    """
    bound, noise = BOUNDS[dtype]
    pairs = [*zip(got.losses, want.losses, strict=True), *zip(got.norms, want.norms, strict=True)]
    found = [f"{value} for {wanted}" for value, wanted in pairs if not abs(value - wanted) <= bound * abs(wanted)]
    for step, gradients in enumerate(want.gradients):
        all_norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
        for name, gradient in gradients.items():
            error = gradient_error(got.gradients[step][name], gradient, all_norm, noise)
            if not error < bound:
                found.append(f"gradient {step} of {name}: {error:.1e}")
    return found


@pytest.mark.parametrize(
    ("path", "shape", "parallel"),
    [
        # each path once, blocked in both shapes; only one rank compiles, as two would compile the same code side by
        # side
        ("blocked", "llama", SEQUENCE),
        ("blocked", "gpt2", SHARD),
        ("compile", "gpt2", {}),
        ("triton", "llama", SEQUENCE),
        pytest.param("blocked", "llama", {}, marks=slow),
        pytest.param("blocked", "gpt2", SEQUENCE, marks=slow),
        pytest.param("compile", "gpt2", SEQUENCE, marks=slow),
        pytest.param("compile", "gpt2", SHARD, marks=slow),
        pytest.param("compile", "llama", SEQUENCE, marks=slow),
        pytest.param("compile", "llama", SHARD, marks=slow),
        pytest.param("compile", "llama", CONTEXT, marks=slow),
        pytest.param("compile", "gpt2", CONTEXT, marks=slow),
        pytest.param("triton", "gpt2", SEQUENCE, marks=slow),
        pytest.param("triton", "gpt2", SHARD, marks=slow),
        pytest.param("triton", "llama", SHARD, marks=slow),
        pytest.param("triton", "llama", CONTEXT, marks=slow),
    ],
    ids=str,
)
def test_every_layout_learns_the_same_on_every_path(path, shape, parallel, tmp_path):
    dtype, seen = PATHS[path]
    tree = tree_of(tmp_path, path, shape)
    want = reference(tree, STEPS[path])
    tree |= {"parallel": parallel, "precision": {"dtype": dtype}}
    num_ranks = prod(parallel.get(axis, 1) for axis in ("tensor", "context", "shard"))
    for got, taken in ranks(num_ranks, first_steps_on, path, tree, STEPS[path], timeout=300):
        assert seen[shape] <= taken
        assert apart(got, want, dtype) == []


def first_steps_with(fault: Fault, path: Backend, tree: dict[str, Any]) -> Trajectory:
    with fault():
        return first_steps_on(path, tree)[0]


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        pytest.param(path, fault, marks=() if path == "blocked" and index in IN_MAKE_TEST else slow)
        for path in PATHS
        for index, fault in enumerate(FAULTS)
        if not (path == "triton" and "pipeline" in FAULTS[fault])  # its only layer has no stages
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_fault_is_caught_on_every_path(path, fault, tmp_path_factory, references):
    dtype, _ = PATHS[path]
    if path not in references:
        tree = tree_of(tmp_path_factory.mktemp(path), path, "gpt2")
        references[path] = tree, reference(tree)
    tree, want = references[path]
    parallel = FAULTS[fault]
    num_ranks = prod(degree for name, degree in parallel.items() if name != "sequence")
    tree = {**tree, "parallel": parallel, "precision": {"dtype": dtype}}
    found = ranks(num_ranks, first_steps_with, fault, path, tree, timeout=300)
    assert any(apart(trajectory, want, dtype) or trajectory.initial_differs(want) for trajectory in found)


@pytest.fixture(scope="module")
def references() -> dict[str, Any]:
    return {}


def run_on(path: Backend, tree: dict[str, Any], world_size: int) -> None:
    with taking(path):
        pretrain(load_run(tree, world_size=world_size), str, str)


@pytest.mark.parametrize(
    ("path", "parallel"), [("blocked", {}), *(pytest.param(path, SEQUENCE, marks=slow) for path in PATHS)], ids=str
)
def test_a_resumed_run_goes_on_bitwise_on_every_path(path, parallel, tmp_path):
    precision = {"dtype": PATHS[path][0]}
    whole = tree_of(tmp_path, path, "gpt2", parallel=parallel, precision=precision, run=str(tmp_path / "whole"))
    whole["train"]["steps"] = 4
    broken = {**whole, "run": str(tmp_path / "broken")}
    num_ranks = parallel.get("tensor", 1)
    ranks(num_ranks, run_on, path, whole, num_ranks, timeout=300)
    for steps in (2, 4):
        part = {**broken, "train": {**whole["train"], "steps": steps}}
        ranks(num_ranks, run_on, path, part, num_ranks, timeout=300)
    want, got = (
        [(record["loss"], record["grad_norm"]) for record in read_metrics(Path(tree["run"]))]
        for tree in (whole, broken)
    )
    assert got == want
