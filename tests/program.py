"""Runs the program: in this process for its messages, or in its own process to be killed."""

import atexit
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import FileIO, StringIO, TextIOWrapper
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest.mock import patch

import torch
import yaml

from megalith.cli.main import main, run
from tests.rank_pool import fork_context

ROOT = Path(__file__).parent.parent
MARK = "MEGALITH_TEST_PROGRAM"  # set in the environment of a program's ranks, to find leftover processes


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


class Program:
    """``megalith ARGUMENTS`` in a session of its own, one thread a rank, forked from the server of ``rank_pool``.

    As started by a shell, but without the seconds that imports take. The ranks of ``--nproc`` have their own server.
    ``first`` are lines of Python that run before it, in the program and in each of its ranks. ``terminal`` is the path
    of the one that it is started from; else what it prints is kept.
    """

    def __init__(self, *arguments: object, first: Sequence[str] = (), terminal: str | None = None) -> None:
        folder = Path(mkdtemp(prefix="program-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        self._out, self._err = (Path(terminal),) * 2 if terminal else (folder / "out", folder / "err")
        self.mark = uuid.uuid4().hex
        environment = os.environ | {"OMP_NUM_THREADS": "1", MARK: self.mark}
        if first:
            # the server of the ranks, not Python's resource tracker
            script = ["import sys", "if any('forkserver' in word for word in sys.orig_argv):"]
            (folder / "sitecustomize.py").write_text("\n".join([*script, *(f"    {line}" for line in first)]))
            environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
        script = "\n".join(first)
        self._process = fork_context().Process(
            target=_be_program, args=([*map(str, arguments)], environment, script, self._out, self._err)
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def code(self) -> int | None:
        """Its exit code, below 0 the signal that killed it, or None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def err(self) -> str:
        """What it has written so far."""
        return self._err.read_text()

    def ended(self, timeout: float = 120) -> "Ended":
        """How it ended."""
        self._process.join(timeout)
        assert self.code is not None, f"it runs on after {timeout} s"
        return Ended(self.code, *(path.read_text() if path.is_file() else "" for path in (self._out, self._err)))


def _be_program(arguments: list[str], environment: dict[str, str], first: str, out: Path, err: Path) -> None:
    os.setsid()
    threading.Thread(target=_end_with_the_test, daemon=True).start()
    for descriptor, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), descriptor)
    # what the server has opened remembers what it was: a file that can seek
    sys.stdout, sys.stderr = (TextIOWrapper(FileIO(number, "w", closefd=False), "utf-8") for number in (1, 2))
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    exec(first, {})  # one namespace, so that its functions find its names
    sys.argv = ["megalith", *arguments]
    main()


def _end_with_the_test() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def start(*arguments: object, first: Sequence[str] = (), terminal: str | None = None) -> Program:
    """``megalith ARGUMENTS`` as a process. With ``--nproc`` it takes seconds: where ``here`` will do, use it.

    A rank of the pool (tests/rank_pool.py) that runs ``here`` acts like a rank started by torchrun.
    """
    return Program(*arguments, first=first, terminal=terminal)


def processes_marked(mark: str) -> list[int]:
    """The processes that have ``mark`` as ``MARK`` in their environment, and have not ended."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={mark}".encode() in environment.read_bytes() and runs(int(environment.parent.name)):
                found.append(int(environment.parent.name))
        except OSError:
            continue  # ended in the meantime, or belongs to another user
    return found


def runs(pid: int) -> bool:
    """Whether a process, or any of its threads, still runs; locks are held until the last thread ends."""
    folder = Path(f"/proc/{pid}")
    try:
        return b"\nState:\tZ" not in (folder / "status").read_bytes() or len(os.listdir(folder / "task")) > 1
    except OSError:
        return False


def start_torchrun(num_ranks: int, *arguments: object) -> "subprocess.Popen[str]":
    """``torchrun -m megalith ARGUMENTS`` on so many ranks."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return subprocess.Popen(
        [sys.executable, *torchrun, "-m", "megalith", *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for_steps(program: Program, run: str | Path, num_steps: int, timeout: float = 120) -> None:
    """Returns when the started run has written so many records; fails if it ends before."""
    metrics = Path(run) / "metrics.jsonl"
    deadline = time.monotonic() + timeout
    while not metrics.exists() or metrics.read_text().count("\n") < num_steps:
        assert program.code is None, program.ended()
        assert time.monotonic() < deadline, "the run never got there"
        time.sleep(0.02)


def write_settings(tree: dict[str, Any], folder: Path) -> Path:
    """``tree`` as a YAML file in ``folder``."""
    path = folder / "settings.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path
