"""Runs the program: in this process for its messages, or in its own process to be killed."""

import atexit
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
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
    """An exit code and the output."""

    code: int
    out: str
    err: str


def here(*arguments: object) -> Ended:
    """Runs ``megalith ARGUMENTS`` in this process, without starting ranks."""
    if "--nproc" in arguments:
        fork_context()  # else the command's own server would become that of all tests of this process
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err), patch.object(sys, "argv", ["megalith", *map(str, arguments)]):
        code = run()
    return Ended(code, out.getvalue(), err.getvalue())


class Program:
    """``megalith ARGUMENTS`` in its own session, one thread per rank, forked from the fork server of ``rank_pool``.

    It behaves as if started by a shell, but without seconds of imports. The ranks of ``--nproc`` have their own fork
    server. ``first`` is Python code that runs beforehand, in the program and in each of its ranks. ``terminal`` is the
    path of its controlling terminal; without one, its output is captured.
    """

    def __init__(self, *arguments: object, first: Sequence[str] = (), terminal: str | None = None) -> None:
        folder = Path(mkdtemp(prefix="program-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        self._out, self._err = (Path(terminal),) * 2 if terminal else (folder / "out", folder / "err")
        self.mark = uuid.uuid4().hex
        environment = os.environ | {"OMP_NUM_THREADS": "1", MARK: self.mark}
        if first:
            # the fork server of the ranks, not Python's resource tracker
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
        """The exit code, the negative signal number if a signal killed it, or None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def err(self) -> str:
        """What it has written to stderr so far."""
        return self._err.read_text()

    def ended(self, timeout: float = 120) -> "Ended":
        """Waits for the end; returns the exit code and the output."""
        self._process.join(timeout)
        assert self.code is not None, f"it runs on after {timeout} s"
        return Ended(self.code, *(path.read_text() if path.is_file() else "" for path in (self._out, self._err)))


def _be_program(arguments: list[str], environment: dict[str, str], first: str, out: Path, err: Path) -> None:
    os.setsid()
    threading.Thread(target=_end_with_the_test, daemon=True).start()
    for descriptor, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), descriptor)
    # file objects that the server opened remember what the descriptor was: a seekable file
    sys.stdout, sys.stderr = (TextIOWrapper(FileIO(number, "w", closefd=False), "utf-8") for number in (1, 2))
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # the server may have asked for it, with an environment of its own
    torch.set_num_threads(1)
    exec(first, {})  # one namespace, so that its functions find their globals
    sys.argv = ["megalith", *arguments]
    main()


def _end_with_the_test() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def start(*arguments: object, first: Sequence[str] = (), terminal: str | None = None) -> Program:
    """Starts ``megalith ARGUMENTS`` as a process. With ``--nproc`` this takes seconds: use ``here`` where it is enough.

    A rank of the pool (tests/rank_pool.py) that calls ``here`` acts like a rank started by torchrun.
    """
    return Program(*arguments, first=first, terminal=terminal)


def processes_marked(mark: str) -> list[int]:
    """The running processes that have ``mark`` as ``MARK`` in their environment."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={mark}".encode() in environment.read_bytes() and runs(int(environment.parent.name)):
                found.append(int(environment.parent.name))
        except OSError:
            continue  # it ended in the meantime, or belongs to another user
    return found


def runs(pid: int) -> bool:
    """Whether a process, or any of its threads, is still running; locks are held until the last thread ends."""
    folder = Path(f"/proc/{pid}")
    try:
        return b"\nState:\tZ" not in (folder / "status").read_bytes() or len(os.listdir(folder / "task")) > 1
    except OSError:
        return False


def start_torchrun(num_ranks: int, *arguments: object) -> "subprocess.Popen[str]":
    """Starts ``torchrun -m megalith ARGUMENTS`` with this many ranks."""
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
    """Returns once the run has written this many records; fails if it ends earlier."""
    metrics = Path(run) / "metrics.jsonl"
    deadline = time.monotonic() + timeout
    while not metrics.exists() or metrics.read_text().count("\n") < num_steps:
        assert program.code is None, program.ended()
        assert time.monotonic() < deadline, "the run never got there"
        time.sleep(0.02)


def write_settings(tree: dict[str, Any], folder: Path) -> Path:
    """Writes ``tree`` as a YAML file in ``folder``."""
    path = folder / "settings.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path
