"""The demo, with a smaller corpus and fewer steps: every step of it, on ranks of the pool."""

import json
from statistics import mean

import pytest

from megalith.insight import demo
from megalith.insight.corpus import standard_library_sources
from megalith.observe.metrics import read_metrics
from tests.program import here, write_settings
from tests.rank_pool import ranks

TINY = {
    "model": {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2},
    "data": {"seq_length": 32},
    "train": {"steps": 100, "global_batch_size": 4, "micro_batch_size": 2},
    "optim": {"lr": 1e-2, "warmup_steps": 5},
}


def launch_in_the_pool(num_ranks: int, arguments: list[str], *where_and_how: object, **more: object) -> int:
    """Replaces ``launch``, whose ranks take seconds to start and which tests/resilience/test_deaths.py tests."""
    return max(found.code for found in ranks(num_ranks, here, *arguments))


@pytest.mark.parametrize(("num_gpus", "layouts"), [(0, ["tp1 dp2", "tp2 dp1"]), (1, ["tp1 dp1", "tp1 dp1"])])
def test_it_trains_changes_its_layout_measures_and_shows(num_gpus, layouts, tmp_path, monkeypatch):
    monkeypatch.setattr(demo.torch.cuda, "device_count", lambda: num_gpus)
    small = [file for file in standard_library_sources() if file.stat().st_size < 20_000][:60]
    monkeypatch.setattr(demo, "standard_library_sources", lambda: small)
    monkeypatch.setattr(demo, "_RECIPE", str(write_settings(TINY, tmp_path)))
    monkeypatch.setattr(demo, "_BATCH", 4)
    monkeypatch.setattr(demo, "_SEQUENCE", 32)
    monkeypatch.setattr(demo, "_STEPS", 100)
    monkeypatch.setattr(demo, "_STEPS_BEFORE_CHANGE", 80)
    monkeypatch.setattr(demo, "launch", launch_in_the_pool)
    lines: list[str] = []
    result = demo.run_demo(tmp_path / "demo", lines.append)
    records = [record for record in read_metrics(result.folder) if "loss" in record]
    assert [record["step"] for record in records] == list(range(1, 101))
    assert [record["layout"] for record in records] == [layouts[0]] * 80 + [layouts[1]] * 20
    # a batch of 128 tokens is noisy, and the text depends on the version of Python
    assert mean(record["loss"] for record in records[-10:]) < records[0]["loss"] - 1.0
    assert abs(records[80]["loss"] - records[79]["loss"]) < 1.0  # the loss curve continues
    said = "\n".join(lines)
    for words in ("corpus: 60 files", "held out", "dtype", "samples", "interpolated bigram", "report.html"):
        assert words in said, words
    page = result.report.read_text()
    for words in (*layouts, "Samples", "Interpolated bigram"):
        assert words in page, words
    assert json.loads((result.folder / "evaluation.json").read_text())["valid_loss"] == result.loss
