"""kill -9 while converting: the folder is complete or absent, and repeating the command creates it."""

import itertools
import os
import signal
import sys
from pathlib import Path

import pytest

from megalith.storage import has_all_files, open_store
from megalith.training.tasks.conversion import export_model, import_model
from tests.rank_pool import ranks
from tests.training.tasks.conversion.folders import write_folder

# names of CPython's audit events
FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir"}
CONVERSIONS = {"import": import_model, "export": export_model}


def killed_at(number: int, conversion: str, source: Path, out: Path) -> None:
    """Converts in a separate process, which is killed before its ``number``-th use of the file system."""
    uses = itertools.count(1)

    def count(event: str, _: tuple[object, ...]) -> None:
        if event in FILE_EVENTS and next(uses) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    CONVERSIONS[conversion](source, out, with_proof=False)
    os._exit(0)


def kill_at(numbers: list[int], conversion: str, source: Path, folder: Path) -> list[int]:
    """The exit code of a conversion into ``folder/NUMBER`` for each of the numbers."""
    codes = []
    for number in numbers:
        if (child := os.fork()) == 0:
            killed_at(number, conversion, source, folder / str(number))
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return codes


def looks_complete(out: Path, conversion: str) -> bool:
    if not out.exists():
        return False
    if conversion == "import":
        assert has_all_files(open_store(out) / "checkpoints" / "step-00000000")
        assert {"config.yaml", "about.json", "tokenizer.json", "eod.json"} <= {path.name for path in out.iterdir()}
    else:
        assert {path.name for path in out.iterdir()} - {".lock"} == {
            *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
        }
    return True


@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("spread", [pytest.param(1, marks=pytest.mark.slow), 23])
def test_a_kill_before_any_use_of_the_file_system_leaves_all_or_nothing(conversion, spread, tmp_path):
    source = tmp_path / "source"
    write_folder(source, "gpt2")
    if conversion == "export":
        source = tmp_path / "run"
        import_model(tmp_path / "source", source, with_proof=False)
    folder = tmp_path / "out"
    folder.mkdir()
    numbers = list(range(1, 230, spread))
    [codes] = ranks(1, kill_at, numbers, conversion, source, folder)  # forked from a process without threads
    found = [looks_complete(folder / str(number), conversion) for number in numbers]
    assert found == sorted(found)  # once present, it stays
    assert codes[0] == -signal.SIGKILL
    assert codes[-1] == 0
    assert not found[0]
    assert found[-1]
    for number, was_made in zip(numbers, found, strict=True):
        if not was_made:
            CONVERSIONS[conversion](source, folder / str(number), with_proof=False)
            assert looks_complete(folder / str(number), conversion)
            break
    left = {path.name for path in folder.iterdir() if path.name.startswith(".")}
    assert left <= {f".{number}.tmp" for number, was_made in zip(numbers, found, strict=True) if not was_made}
