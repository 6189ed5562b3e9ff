"""User mistakes: each gives one message that says what to do, exit code 2, and nothing changed on disk."""

import re
import resource
import signal

import pytest

from tests.cli.chat_mistakes import CHAT_MISTAKES
from tests.cli.conversion_mistakes import CONVERSION_MISTAKES
from tests.cli.mistakes import MISTAKES, other_shape, snapshot, train
from tests.cli.more_mistakes import ENVIRONMENTS, MORE_MISTAKES
from tests.program import Ended, here, start, start_torchrun, wait_for_steps
from tests.rank_pool import ranks

ALL_MISTAKES = MISTAKES | MORE_MISTAKES | CONVERSION_MISTAKES | CHAT_MISTAKES


@pytest.mark.parametrize("name", ALL_MISTAKES)
def test_a_mistake_is_one_message_and_changes_nothing(name, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent/c++")  # as on a machine without a compiler
    mistake, says = ALL_MISTAKES[name]
    arguments = mistake(tmp_path)
    before = snapshot(tmp_path)
    found = here(*arguments)
    assert found.code == 2, found
    assert found.err.startswith("error: ")
    assert "Traceback" not in found.err
    assert re.search(says, found.err), found.err
    after = snapshot(tmp_path)
    lock = str(tmp_path / "run" / ".lock")
    assert {path: digest for path, digest in after.items() if path != lock} == {
        path: digest for path, digest in before.items() if path != lock
    }


def test_there_are_150_mistakes_and_each_has_its_own_name():
    assert len(ALL_MISTAKES) + len(ENVIRONMENTS) >= 150
    assert not MISTAKES.keys() & MORE_MISTAKES.keys()


def test_a_working_folder_that_was_deleted_is_one_message(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    document = tmp_path / "d.txt"
    document.write_text("some words")
    found = here("data", "prepare", document, "--out", tmp_path / "p", "--vocab-size", 300)
    assert (found.code, found.err) == (
        2,
        "error: the working directory no longer exists; change to another one (cd)\n",
    )


@pytest.mark.parametrize(("variables", "says"), ENVIRONMENTS, ids=str)
def test_a_rank_of_half_a_launcher_is_refused(variables, says, tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = here(*train(tmp_path))
    assert found.code == 2, found
    assert found.err.startswith("error: ")
    assert "Traceback" not in found.err
    assert re.search(says, found.err), found.err
    assert not (tmp_path / "run").exists()


def test_nproc_beside_a_launcher_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    found = here(*train(tmp_path), "--nproc", 2)
    assert found.code == 2, found
    assert "--nproc (2) has no effect here: a launcher has started 1 rank (RANK and" in found.err


def test_under_torchrun_every_rank_ends_with_code_2_and_one_has_the_message(tmp_path):
    arguments = train(tmp_path, "model.num_attention_heads=5", "parallel.tensor=2")
    _, err = start_torchrun(2, *arguments).communicate(timeout=60)
    assert err.count("error: ") == 1
    assert "num_attention_heads" in err
    assert "exitcode  : 2" in err  # torchrun's own exit code is 1, whatever a rank's was
    assert not (tmp_path / "run").exists()


def train_as_a_program(*arguments: object) -> Ended:
    return start(*arguments, "--nproc", 2).ended()


def train_on_ranks_of_the_pool(*arguments: object) -> Ended:
    """The same without a program's start-up time: runs what each of its ranks runs."""
    first, second = ranks(2, here, *arguments)
    return Ended(first.code if first.code == second.code else -1, first.out + second.out, first.err + second.err)


@pytest.mark.parametrize("run", [train_on_ranks_of_the_pool, pytest.param(train_as_a_program, marks=pytest.mark.slow)])
def test_what_only_ranks_can_find_ends_all_of_them_with_code_2(run, tmp_path):
    arguments = [*other_shape(tmp_path), "parallel.tensor=2"]
    before = snapshot(tmp_path / "run" / "checkpoints")
    found = run(*arguments)
    assert found.code == 2, found
    assert found.err.count("error: ") == 1
    assert "layers.2" in found.err
    assert snapshot(tmp_path / "run" / "checkpoints") == before


def test_a_second_run_in_one_folder_is_refused_and_the_first_goes_on(tmp_path):
    arguments = train(tmp_path, train={"steps": 100000, "log_every": 1})
    first = start(*arguments)
    wait_for_steps(first, tmp_path / "run", 2)
    second = here(*arguments)
    assert second.code == 2, second
    assert "is in use by another run" in second.err
    assert f'"pid": {first.pid}' in second.err
    third = here(*arguments, "--nproc", 2)
    assert (third.code, "is in use by another run" in third.err) == (2, True)
    assert not list((tmp_path / "run" / "logs").glob("rank-*"))  # nothing was written among the first one's rank logs
    assert first.code is None
    first.send_signal(signal.SIGTERM)
    assert first.ended().code == 75


def here_with_files_up_to(size: int, *arguments: object) -> Ended:
    """Runs ``here`` where the system refuses to write beyond ``size`` bytes of a file, like a full disk."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, usual[1]))
    try:
        return here(*arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


def test_a_full_disk_ends_the_run_with_earlier_checkpoints_as_they_were(tmp_path):
    arguments = train(tmp_path, train={"steps": 2}, checkpoint={"every": 1})
    assert here(*arguments, "train.steps=1").code == 0
    before = snapshot(tmp_path / "run" / "checkpoints")
    [found] = ranks(1, here_with_files_up_to, 64 * 1024, *arguments)  # bytes: below a checkpoint, above the metrics
    assert found.code == 2, found
    assert "step 2 was not saved and earlier checkpoints are unchanged" in found.err
    assert snapshot(tmp_path / "run" / "checkpoints") == before


def failing_loader(error: str) -> list[str]:
    """Lines that make rank 1 fail to read its second batch."""
    return [
        "import os",
        "from megalith.data.loader import StepLoader",
        "from megalith.errors import DataError",
        "read = StepLoader.batch",
        "def batch(self, consumed, *sizes):",
        f"    if consumed and os.environ['RANK'] == '1': raise {error}('this part cannot be read')",
        "    return read(self, consumed, *sizes)",
        "StepLoader.batch = batch",
    ]


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        pytest.param("DataError", 2, "error: rank 1: this part cannot be read\n", marks=pytest.mark.slow),
        ("KeyError", 1, "rank 1 failed:\nTraceback"),
    ],
)
def test_data_that_one_rank_cannot_read_end_the_run_at_once_with_its_message(error, code, message, tmp_path):
    arguments = [*train(tmp_path, "parallel.shard=2", train={"log_every": 1}), "--nproc", 2]
    found = start(*arguments, first=failing_loader(error)).ended(timeout=60)
    assert found.code == code, found
    assert message in found.err
    assert found.err.count("Traceback") == (error == "KeyError")
    assert found.err.count("error: ") == 1 or error == "KeyError"


def failing_evaluation(rank: int, action: str) -> list[str]:
    """Lines that make ``rank`` do ``action`` instead of evaluating."""
    return [
        "import os",
        "from megalith.errors import DataError",
        "from megalith.training import callbacks",
        "evaluate = callbacks.evaluate",
        "def fail(*args, **kwargs):",
        f"    if os.environ['RANK'] == '{rank}': {action}",
        "    return evaluate(*args, **kwargs)",
        "callbacks.evaluate = fail",
    ]


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_an_error_of_one_rank_alone_is_told_by_its_number_and_gives_the_exit_code(rank, tmp_path):
    prefix = tmp_path / "text"
    arguments = train(tmp_path, "parallel.shard=2", train={"eval_every": 1}, data={"valid": str(prefix)})
    fault = failing_evaluation(rank, "raise DataError('the held-out text cannot be read')")
    found = start(*arguments, "--nproc", 2, first=fault).ended(timeout=60)
    assert found.code == 2, found
    assert found.err.endswith(f"error: rank {rank}: the held-out text cannot be read\n")


def test_input_that_one_rank_alone_cannot_see_ends_all_with_code_2(tmp_path):
    arguments = [*train(tmp_path), "parallel.shard=2", "--nproc", 2]
    blind = [
        "import os",
        "from megalith.data import indexed_dataset",
        "read = indexed_dataset.read_index",
        "def index(store, name):",
        "    return read(store / 'elsewhere' if os.environ.get('RANK') == '1' else store, name)",
        "indexed_dataset.read_index = index",
    ]
    found = start(*arguments, first=blind).ended(timeout=60)
    assert found.code == 2, found
    assert found.err.count("error: ") == 1
    assert "error: rank 1: " in found.err
