"""fusions.explain(): a row for each operation, with the path it would take and why."""

import torch

from megalith import fusions
from megalith.fusions.core.registry import FUSIONS
from tests.fusions.harness import all_cases


def test_every_operation_is_in_the_table_in_the_list_and_in_the_tests():
    names = FUSIONS.keys()
    assert names == {case.fusion.name for case in all_cases()}
    rows = fusions.explain("cpu").splitlines()
    assert [row.split()[0] for row in rows] == ["operation", *sorted(names)]


def test_the_path_is_the_one_that_would_be_taken():
    row = next(row for row in fusions.explain("cpu").splitlines() if row.startswith("glu "))
    assert row.split()[1] in FUSIONS["glu"].defaults["cpu"]
    assert "default for cpu" in row
    with fusions.use("reference"):
        row = next(row for row in fusions.explain("cpu").splitlines() if row.startswith("glu "))
    assert row.split()[1] == "reference"
    assert "use(...)" in row
    with fusions.use("blocked"):
        row = next(row for row in fusions.explain("cpu").splitlines() if row.startswith("attention "))
    assert row.split()[1] == "aten"
    assert "default for cpu; 'blocked' is not available: it has no such path" in row
    assert "kernels compute in float32" not in fusions.explain("cuda", torch.float64)  # it takes the reference path


def test_a_default_that_cannot_run_here_says_why(monkeypatch):
    monkeypatch.setattr("megalith.fusions.core.dispatch.has_triton", lambda: False)
    assert "default for cuda, but triton is not installed" in fusions.explain("cuda")


def test_on_a_hopper_gpu_it_says_which_calls_take_another_path(monkeypatch):
    def row(operation: str) -> str:
        return next(line for line in fusions.explain("cuda:0").splitlines() if line.startswith(f"{operation} "))

    monkeypatch.setattr("megalith.fusions.core.explain.is_hopper", lambda device: True)
    monkeypatch.setattr("megalith.fusions.core.dispatch.is_hopper", lambda device: True)
    assert "default for cuda; aten (cuDNN) for the calls that it can compute" in row("attention")
    assert "cuDNN" not in row("glu")
    assert row("grouped_matmul").split()[1] == "aten"
    with fusions.use("triton"):
        assert "cuDNN" not in row("attention")
