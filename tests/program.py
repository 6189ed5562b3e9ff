"""Runs the program itself: in this process for its messages, or in a process of its own to be killed."""

import os
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from megalith.cli.main import run


@dataclass(frozen=True)
class Ended:
    """Exit code and what was printed."""

    code: int
    out: str
    err: str


def here(*arguments: object) -> Ended:
    """``megalith ARGUMENTS`` in this process, without starting ranks."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err), patch.object(sys, "argv", ["megalith", *map(str, arguments)]):
        code = run()
    return Ended(code, out.getvalue(), err.getvalue())


def start(*arguments: object) -> "subprocess.Popen[str]":
    """``megalith ARGUMENTS`` in a session of its own, one thread a rank. Takes seconds: where ``here`` will do, use it.

    A rank of the pool (tests/rank_pool.py) that runs ``here`` is a rank that torchrun has started.
    """
    return _start(["-m", "megalith", *arguments])


def start_torchrun(num_ranks: int, *arguments: object) -> "subprocess.Popen[str]":
    """``torchrun -m megalith ARGUMENTS`` on so many ranks."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks]
    return _start([*torchrun, "-m", "megalith", *arguments])


def _start(arguments: list[object]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for_steps(process: "subprocess.Popen[str]", run: str | Path, num_steps: int, timeout: float = 120) -> None:
    """Returns when the started run has written so many records; fails if it ends before."""
    metrics = Path(run) / "metrics.jsonl"
    deadline = time.monotonic() + timeout
    while not metrics.exists() or metrics.read_text().count("\n") < num_steps:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run never got there"
        time.sleep(0.02)


def ended(process: "subprocess.Popen[str]", timeout: float = 120) -> Ended:
    """What became of a started program."""
    out, err = process.communicate(timeout=timeout)
    return Ended(process.returncode, out, err)


def write_settings(tree: dict[str, Any], folder: Path) -> Path:
    """``tree`` as a YAML file in ``folder``."""
    path = folder / "settings.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path
