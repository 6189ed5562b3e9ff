"""A terminal with an interactive shell that starts a run of two ranks: Ctrl-Z, fg, and closing the window."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.program import MARK, processes_marked, write_settings
from tests.resilience.test_deaths import read_in_the_background
from tests.tiny_run import settings
from tests.training.outcomes import losses, saved_step

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs an interactive shell")


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def num_stopped(mark: str) -> int:
    """How many of the marked processes are stopped by a signal."""
    found = 0
    for pid in processes_marked(mark):
        with suppress(OSError):
            found += re.search(r"^State:\tT", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE) is not None
    return found


@pytest.fixture
def mark() -> Iterator[str]:
    mark = uuid.uuid4().hex
    yield mark
    for pid in processes_marked(mark):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def num_records(run: str) -> int:
    metrics = Path(run, "metrics.jsonl")
    return metrics.read_text().count("\n") if metrics.exists() else 0


def test_ctrl_z_suspends_all_ranks_and_a_closed_terminal_saves(tmp_path, mark):
    tree = settings(tmp_path, parallel={"tensor": 2}, train={"steps": 100000})
    command = [sys.executable, "-m", "megalith", "train", str(write_settings(tree, tmp_path)), "--nproc", "2"]
    ours, theirs = os.openpty()
    path = os.ttyname(theirs)
    environment = os.environ | {MARK: mark, "OMP_NUM_THREADS": "1"}
    # the first terminal that a session leader opens becomes the session's controlling terminal
    become_shell = f"exec bash --norc --noprofile -i < {path} > {path} 2>&1"
    shell = subprocess.Popen(["bash", "-c", become_shell], start_new_session=True, env=environment)
    with read_in_the_background(ours):
        os.write(ours, f"{' '.join(command)}\n".encode())
        wait_for(lambda: num_records(tree["run"]) > 1, "no step was done")
        os.write(ours, b"\x1a")
        wait_for(lambda: num_stopped(mark) >= 3, "the program and its ranks are not stopped")
        done = num_records(tree["run"])
        os.write(ours, b"fg\n")
        wait_for(lambda: num_records(tree["run"]) > done, "the run does not go on")
    os.close(theirs)
    os.close(ours)
    shell.wait(timeout=60)
    wait_for(lambda: not processes_marked(mark), "something is left running")
    assert saved_step(tree["run"]) == len(losses(tree["run"])) > 0
