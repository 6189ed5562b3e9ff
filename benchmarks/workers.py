"""Long-lived child processes that answer one command at a time, so that only one of them runs at any moment.

Commands and answers are lines of JSON over a pair of pipes. Whatever a library prints goes to the worker's log.
"""

import contextlib
import json
import os
import resource
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Worker", "WorkerError", "serve"]

Answer = dict[str, Any]
_ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, "-m", "benchmarks.worker"]


class WorkerError(Exception):
    """Why a worker gave no answer, in one line."""


class Worker:
    """``python -m benchmarks.worker ARGUMENTS``, started with ``environment`` and stopped by ``close``."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                [*COMMAND, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=dict(environment),
                cwd=_ROOT,
            )

    def ask(self, command: str, timeout: float) -> Answer:
        """The answer to ``command``. Raises WorkerError if it is an error, or takes longer than ``timeout`` seconds."""
        assert self._process.stdin is not None, "opened as a pipe"
        with contextlib.suppress(BrokenPipeError):  # the read below then finds the end and reports why
            self._process.stdin.write(command.encode() + b"\n")
            self._process.stdin.flush()
        answer: Answer = json.loads(self._line(command, timeout))
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer

    def close(self) -> None:
        """Kills the process, whether or not it is busy."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None, "opened as a pipe"
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _line(self, command: str, timeout: float) -> bytes:
        assert self._process.stdout is not None, "opened as a pipe"
        deadline, line = time.monotonic() + timeout, b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise WorkerError(f"no answer to {command!r} within {timeout:g} s")
            part = os.read(self._process.stdout.fileno(), 1 << 16)
            if not part:
                raise WorkerError(f"ended with code {self._process.wait()}: {self._last_words()}")
            line += part
        return line

    def _last_words(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else "no output"


def serve(commands: Mapping[str, Callable[[], Answer]]) -> None:
    """Answers commands until the pipe ends; each answer carries the peak memory of this process, in bytes."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # from here on, everything printed goes to the log
        for line in sys.stdin:
            try:
                answer = commands[line.strip()]()
                # of the resident set; KiB on Linux
                answer["peak_rss"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
            print(json.dumps(answer), file=answers, flush=True)
