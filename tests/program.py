"""Runs the program itself: in this process for its messages, or in a process of its own to be killed."""

import os
import subprocess
import sys
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


def start(*arguments: object, **environment: str) -> "subprocess.Popen[str]":
    """``megalith ARGUMENTS`` in a process group of its own, one thread a rank."""
    return subprocess.Popen(
        [sys.executable, "-m", "megalith", *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(process: "subprocess.Popen[str]", timeout: float = 120) -> Ended:
    """What became of a started program."""
    out, err = process.communicate(timeout=timeout)
    return Ended(process.returncode, out, err)


def write_settings(tree: dict[str, Any], folder: Path) -> Path:
    """``tree`` as a YAML file in ``folder``."""
    path = folder / "settings.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path
