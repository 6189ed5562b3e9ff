"""benchmarks/moe_layer at its tiny size, on any device: every contender is correct and timed."""

import pytest
import torch

from benchmarks import moe_layer
from benchmarks.experts import Size
from benchmarks.moe_layer import rows_of

SIZE = Size(T=32, H=16, F=32, E=8, K=2)


def test_every_contender_is_judged_and_timed():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = rows_of(SIZE, device, 2)
    assert {"Megalith", "Hugging Face, grouped_mm", "Hugging Face, eager"} <= rows.keys()
    for name, row in rows.items():
        assert row.problem is None, name
        assert row.milliseconds > 0
        assert row.speed > 0
    assert rows["Megalith"].host_waits == (0 if device == "cuda" else None)
    assert ("Megalith, in a CUDA graph" in rows) == (device == "cuda")


def test_a_contender_that_is_wrong_or_fails_is_a_row_without_a_time(monkeypatch):
    def wrong(*arguments, **options):
        step = moe_layer_ours(*arguments, **options)
        gate = step._model.gate.weight
        gate.data = gate.roll(1, dims=0)
        return step

    def failing(*arguments, experts, **options):
        raise RuntimeError(f"{experts} is not there")

    moe_layer_ours = moe_layer.ours
    monkeypatch.setattr(moe_layer, "ours", wrong)
    monkeypatch.setattr(moe_layer, "theirs", failing)
    rows = rows_of(SIZE, "cpu", 1)
    assert rows["Megalith"].problem.startswith("wrong: a gradient is ")
    assert rows["Hugging Face, eager"].problem == "RuntimeError: eager is not there"
    assert all(row.milliseconds is None for row in rows.values())


def test_the_command_runs_without_a_gpu(monkeypatch, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, which would be measured")
    monkeypatch.setattr("sys.argv", ["moe_layer"])
    moe_layer.main()
    assert "Hugging Face, grouped_mm" in capsys.readouterr().out
