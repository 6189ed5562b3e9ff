"""One measured process; the first argument selects its role.

python -m benchmarks.worker calibrate
python -m benchmarks.worker prepare CASE SIZE FOLDER
python -m benchmarks.worker contend CASE SIZE FOLDER NAME
"""

import dataclasses
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.calibration import Calibration
from benchmarks.case import Runner
from benchmarks.registry import CASES
from benchmarks.workers import Answer, serve

__all__: list[str] = []


def _calibrate() -> None:
    calibration = functools.cache(Calibration)  # built at the first command, when nothing else is being measured
    serve({"measure": lambda: {"rates": calibration().measure()}})


def _prepare(case: str, size: str, folder: str) -> None:
    def write() -> Answer:
        CASES[case].prepare(CASES[case].sizes[size], Path(folder))
        return {}

    serve({"write": write})


def _contend(case: str, size: str, folder: str, name: str) -> None:
    @functools.cache
    def runner() -> Runner:
        return CASES[case].contenders[name].build(CASES[case].sizes[size], Path(folder))

    def run() -> Answer:
        start = time.perf_counter()
        runner().run()
        return {"seconds": time.perf_counter() - start}

    serve({"first": lambda: dataclasses.asdict(runner().first()), "run": run})


ROLES: dict[str, Callable[..., None]] = {"calibrate": _calibrate, "prepare": _prepare, "contend": _contend}

if __name__ == "__main__":
    ROLES[sys.argv[1]](*sys.argv[2:])
