"""garbage_collection: none while a command imports what it needs, as usual afterwards and in every rank."""

import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megalith.garbage_collection import importing
from tests.program import start, write_settings
from tests.tiny_run import settings

# counts the collections of a command that imports what it needs and then finds that its input is wrong
COMMAND = """
import gc, sys
from megalith.cli.main import run

began = []
gc.callbacks.append(lambda phase, _: began.append(phase) if phase == "start" else None)
sys.argv = ["megalith", *sys.argv[1:]]
code = run()
print(code, "torch" in sys.modules, len(began), gc.isenabled())
"""
# writes how a process collects when it trains
NOTE = """
import functools, gc, importlib, json, os
from pathlib import Path

def note(folder):
    module = importlib.import_module("megalith.training.pretrain")
    train = module.train

    @functools.wraps(train)
    def noted(*args, **kwargs):
        found = [gc.isenabled(), gc.get_freeze_count() > 100_000]
        Path(folder, os.environ.get("RANK", "0")).write_text(json.dumps(found))
        return train(*args, **kwargs)

    module.train = noted
""".splitlines()
CALL_RANKS = """
import json
from megalith.resilience.call_ranks import call_ranks
from tests.test_garbage_collection import how_it_collects

if __name__ == "__main__":
    print(json.dumps(call_ranks(1, how_it_collects)))
"""


@pytest.fixture
def nothing_frozen_afterwards() -> Iterator[None]:
    yield
    gc.unfreeze()


def import_what_is_absent() -> None:
    with importing():
        assert not gc.isenabled()
        raise ImportError("absent")


@pytest.mark.parametrize("enabled", [True, False])
def test_importing_collects_nothing_and_restores_what_was(enabled, nothing_frozen_afterwards):
    try:
        if not enabled:
            gc.disable()
        with pytest.raises(ImportError, match="absent"):
            import_what_is_absent()
        assert gc.isenabled() is enabled
        assert gc.get_freeze_count() > 100_000
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "command", [["train", "llama-4m", "optim.lr=-1"], ["eval", "absent"], ["generate", "absent"]], ids=lambda x: x[0]
)
def test_a_command_collects_nothing_while_it_imports_and_as_usual_afterwards(command):
    run = [sys.executable, "-c", COMMAND, *command]
    out = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    code, imported, collections, enabled = out.split()
    assert (code, imported, enabled) == ("2", "True", "True")
    assert int(collections) < 200  # 1,000 with the collector


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_and_its_ranks_collect_as_usual_without_what_was_imported(num_ranks, tmp_path):
    file = write_settings(settings(tmp_path, train={"steps": 1}, parallel={"shard": num_ranks}), tmp_path)
    ended = start("train", file, "--nproc", num_ranks, first=[*NOTE, f"note({str(tmp_path)!r})"]).ended()
    assert ended.code == 0, ended
    for rank in range(num_ranks):
        assert json.loads(Path(tmp_path, str(rank)).read_text()) == [True, True]


def how_it_collects() -> list[bool]:
    return [gc.isenabled(), gc.get_freeze_count() > 100_000]


def test_ranks_that_call_a_function_collect_as_usual():
    run = [sys.executable, "-c", CALL_RANKS]  # the ranks of this process come from the server of the tests
    out = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert json.loads(out) == [[True, True]]
