"""garbage_collection: hardly ever while a command starts, as Python does by itself while a run trains."""

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.program import start, write_settings
from tests.tiny_run import settings

# writes how a process collects when it calls a function: its first threshold, and whether many objects are excluded
NOTE = """
import functools, gc, importlib, json, os
from pathlib import Path

def note(module, name, folder):
    module = importlib.import_module(module)
    function = getattr(module, name)

    @functools.wraps(function)
    def noted(*args, **kwargs):
        found = [gc.get_threshold()[0], gc.get_freeze_count() > 100_000]
        Path(folder, f"{name}-{os.environ.get('RANK', 0)}").write_text(json.dumps(found))
        return function(*args, **kwargs)

    setattr(module, name, noted)
""".splitlines()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_collects_rarely_until_everything_is_imported_and_then_as_usual(num_ranks, tmp_path):
    file = write_settings(settings(tmp_path, train={"steps": 1}, parallel={"shard": num_ranks}), tmp_path)
    places = [("megalith.training.preflight", "preflight"), ("megalith.training.pretrain", "train")]
    calls = [f"note({module!r}, {name!r}, {str(tmp_path)!r})" for module, name in places]
    ended = start("train", file, "--nproc", num_ranks, first=[*NOTE, *calls]).ended()
    assert ended.code == 0, ended

    def noted(name: str, rank: int = 0) -> list[object]:
        return json.loads(Path(tmp_path, f"{name}-{rank}").read_text())

    usually = gc.get_threshold()[0]
    for rank in range(num_ranks):
        assert noted("preflight", rank)[0] == 1_000_000
        assert noted("train", rank) == [usually, True]


PROGRAM = """
import gc, json
from megalith.resilience.call_ranks import call_ranks
from tests.test_garbage_collection import how_it_collects

if __name__ == "__main__":
    print(json.dumps(call_ranks(1, how_it_collects)))
"""


def how_it_collects() -> list[object]:
    return [gc.get_threshold()[0], gc.get_freeze_count() > 100_000]


def test_ranks_that_call_a_function_collect_as_usual():
    run = [sys.executable, "-c", PROGRAM]  # the ranks of this process come from the server of the tests
    out = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert json.loads(out) == [[gc.get_threshold()[0], True]]
