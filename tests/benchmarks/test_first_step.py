"""The benchmark of a run's start: seconds until the first step, and an error if there is none."""

import subprocess
import sys

import pytest

from benchmarks.environment import surroundings
from benchmarks.first_step import STARTS, Start, as_markdown, seconds_to_first_step


def test_it_times_a_run_until_its_first_step(tmp_path):
    [short] = [start for start in STARTS if start.name.startswith("short run")]
    found = seconds_to_first_step(short, tmp_path, "llama-4m")
    assert 0.5 < found < 100
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 2


def test_a_run_that_fails_is_told_with_its_output(tmp_path):
    with pytest.raises(RuntimeError, match=r"wrong: exit code 2\n(.*\n)*.*optim\.lr"):
        seconds_to_first_step(Start("wrong", ["optim.lr=-1"]), tmp_path, "llama-4m")


def test_each_cache_is_emptied_before_it_is_found_full():
    names = [start.name for start in STARTS if start.compiles]
    assert [start.name for start in STARTS if start.empties_cache] == [name for name in names if "empty" in name]
    assert STARTS[0].empties_cache


def test_the_table_has_medians_and_every_round():
    table = as_markdown({"one": [3.0, 1.0, 2.0]}, {"cpu": "a", "torch": "b"}, "today")
    assert "| one | 2.0 | 3.0, 1.0, 2.0 |" in table
    assert table.splitlines()[-1] == "cpu a, torch b"


def test_a_benchmark_finds_neither_compiled_code_nor_headers_of_earlier_runs(tmp_path):
    script = "from torch._inductor.codecache import _HEADER_DIR, cache_dir; print(_HEADER_DIR, cache_dir())"
    run = [sys.executable, "-c", script]
    out = subprocess.run(run, env=surroundings(tmp_path), capture_output=True, text=True, check=True).stdout
    assert [path.startswith(f"{tmp_path}/") for path in out.split()] == [True, True]
