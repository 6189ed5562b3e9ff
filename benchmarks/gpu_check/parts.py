"""The parts of the check, most valuable first; each adds lines to the record until its deadline."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from benchmarks.fusions.registry import OPERATIONS
from benchmarks.gpu_check import correct, host, machine, sweeps
from benchmarks.gpu_check.attention import attention
from benchmarks.gpu_check.attention import items as attention_items
from benchmarks.gpu_check.fp8 import fp8
from benchmarks.gpu_check.fp8 import items as fp8_items
from benchmarks.gpu_check.losses import items as losses_items
from benchmarks.gpu_check.losses import losses
from benchmarks.gpu_check.record import Record
from benchmarks.restartable import Item, Job, Line, lines_of

__all__ = ["PARTS", "Part", "run_parts"]

_ROOT = Path(__file__).parents[2]
_AT_ONCE = 16  # processes for checking or compiling, where nothing is timed
_LIMIT = 90.0  # seconds for one item
_ROUNDS = 5
_SIZES = (64 << 20, 1 << 30)
_SANITIZER = "compute-sanitizer"
_LAST_WORDS = 600  # characters of a command's output that are kept
_RACES = {
    "permute": None,
    "row_map": None,
    "rms_norm": 16385,
}  # by fusion: the width, if it differs from that of the check
_TESTS = [
    "tests/fusions",
    "tests/transformer/moe",
    "tests/acceleration/test_fp8_utils.py",
    "tests/acceleration/test_full_cuda_graph.py",
    "tests/acceleration/test_refused_captures.py",
    "tests/benchmarks/test_moe_layer.py",
    "tests/observe/test_memory.py",
]


class Part(NamedTuple):
    """A function, and its share of a budget of 600 seconds."""

    run: Callable[[Record, float, bool], None]  # (record, deadline, tiny)
    seconds: float


def run_parts(record: Record, names: list[str], budget: float, tiny: bool) -> None:
    """Runs the parts ``names``; if one fails, a line says so and the next one runs.

    If more time is left than the shares of the remaining parts, these are scaled up in proportion.
    """
    end = time.monotonic() + budget
    for index, name in enumerate(names):
        left = end - time.monotonic()
        meant = sum(PARTS[other].seconds for other in names[index:])
        if left <= 0:
            record.add(name, {"failure": "not run: no time was left"})
            continue
        start = time.monotonic()
        deadline = start + min(left, PARTS[name].seconds * max(1.0, left / meant))
        try:
            PARTS[name].run(record, deadline, tiny)
        except Exception as error:
            record.add(name, {"failure": f"{type(error).__name__}: {error}"[:_LAST_WORDS]})
        record.add(name, {"seconds": round(time.monotonic() - start, 1)})


def _machine(record: Record, deadline: float, tiny: bool) -> None:
    for name, items in machine.items(tiny).items():
        for line in lines_of(getattr(machine, name), items, _LIMIT, deadline):
            record.add("machine", line)


def _correct(record: Record, deadline: float, tiny: bool) -> None:
    items = [item for of_fusion in correct.items(tiny).values() for item in of_fusion]
    _at_once(correct.case_is_right, items, deadline, tiny, lambda line: record.add("correct", line))


def _at_once(job: Job, items: list[Item], deadline: float, tiny: bool, keep: Callable[[Line], None]) -> None:
    """``lines_of`` in several processes, each with part of the items; for untimed work."""

    def work(share: list[Item]) -> None:
        for line in lines_of(job, share, _LIMIT, deadline):
            keep(line)

    num_processes = 1 if tiny else min(_AT_ONCE, len(items))
    with ThreadPoolExecutor(num_processes) as pool:
        for done in [pool.submit(work, items[first::num_processes]) for first in range(num_processes)]:
            done.result()


def _compile_ahead(job: Job, items: list[Item], deadline: float, tiny: bool) -> None:
    """Compiles in many processes what a single one will time: otherwise the device spends half of the time waiting."""
    if not tiny:
        _at_once(job, items, deadline, tiny, lambda line: None)


def _failures(record: Record, deadline: float, tiny: bool) -> None:
    """Repeats failed cases with blocking launches and, if installed, under memcheck."""
    failed = {line["item"] for line in record.of("correct") if line.get("failure")}
    chosen = [item for items in correct.items(tiny).values() for item in items if item.name in failed]
    for item in chosen:
        _command(record, "failures", f"{item.name}, blocking launches", _one(item), deadline, CUDA_LAUNCH_BLOCKING="1")
        if sanitizer := shutil.which(_SANITIZER):
            _check(record, "failures", sanitizer, "memcheck", item, deadline)


def _check(record: Record, part: str, sanitizer: str, tool: str, item: Item, deadline: float) -> None:
    """Runs ``item`` under a tool of compute-sanitizer."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", "1", *_one(item)]
    _command(record, part, f"{item.name}, {tool}", command, deadline, PYTORCH_NO_CUDA_MEMORY_CACHING="1")


def _sanitizer(record: Record, deadline: float, tiny: bool) -> None:
    """Runs a case of every operation under memcheck, and those of ``_RACES`` under racecheck, several at once."""
    sanitizer, cases = shutil.which(_SANITIZER), correct.items(tiny)
    if sanitizer is None or tiny:
        record.add("sanitizer", {"item": _SANITIZER, "skipped": "it is not installed, or there is no GPU"})
        return
    chosen = [("memcheck", of_fusion[0]) for of_fusion in cases.values()]
    for fusion, width in _RACES.items():
        name, (case, rows, usual, device) = cases[fusion][0]
        chosen.append(("racecheck", Item(name, (case, rows[:1], width or usual, device))))
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for done in [pool.submit(_check, record, "sanitizer", sanitizer, *one, deadline) for one in chosen]:
            done.result()


def _timing(record: Record, deadline: float, tiny: bool) -> None:
    device, sizes = ("cpu", (1 << 12,)) if tiny else ("cuda", _SIZES)
    names = ["rms norm", "swiglu, bias"] if tiny else list(OPERATIONS)
    items = [Item(f"{name}, {size >> 20} MiB", (name, size, device, _ROUNDS)) for size in sizes for name in names]
    ahead = [Item(name, (name, sizes[0], device, 0)) for name in names]
    _compile_ahead(sweeps.kernels_timed, ahead, deadline, tiny)
    for line in lines_of(sweeps.kernels_timed, items, _LIMIT, deadline):
        record.add("timing", line)


def _attention(record: Record, deadline: float, tiny: bool) -> None:
    items = attention_items(tiny)
    _compile_ahead(attention, [item for item in items if item.arguments[0] == "Megalith"], deadline, tiny)
    for line in lines_of(attention, items, _LIMIT, deadline):
        record.add("attention", line)


def _losses(record: Record, deadline: float, tiny: bool) -> None:
    for line in lines_of(losses, losses_items(tiny), _LIMIT, deadline):
        record.add("losses", line)


def _fp8(record: Record, deadline: float, tiny: bool) -> None:
    for line in lines_of(fp8, fp8_items(tiny), _LIMIT, deadline):
        record.add("fp8", line)


def _sweeps(record: Record, deadline: float, tiny: bool) -> None:
    items = sweeps.items(tiny)
    ahead = [item._replace(arguments=(*item.arguments[:2], _SIZES[0], "cuda", 0)) for item in items]
    _compile_ahead(sweeps.swept, ahead, deadline, tiny)
    for line in lines_of(sweeps.swept, items, _LIMIT, deadline):
        record.add("sweeps", line)


def _host(record: Record, deadline: float, tiny: bool) -> None:
    for name, items in host.items(tiny).items():
        for line in lines_of(getattr(host, name), items, _LIMIT, deadline):
            record.add("host", line)


def _tests(record: Record, deadline: float, tiny: bool) -> None:
    """The suite's tests that use a GPU: kernels in every dtype, experts, FP8, CUDA graphs, memory, energy."""
    chosen = ["tests/fusions/core/test_records.py"] if tiny else ["-n", str(_AT_ONCE), *_TESTS]
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    _command(record, "tests", "pytest", [*pytest, *chosen], deadline)
    # alone, because others would change the power that it compares with
    _command(record, "tests", "pytest, energy", [*pytest, "tests/observe/test_energy_monitor.py"], deadline)


def _train(record: Record, deadline: float, tiny: bool) -> None:
    """The demo: a small model is trained, saved and loaded, by one rank with NCCL."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "megalith", "demo", "--out", str(Path(folder, "demo"))]
        _command(record, "train", "megalith demo", [*command, *(["--help"] if tiny else [])], deadline)


def _experts(record: Record, deadline: float, tiny: bool) -> None:
    command = [sys.executable, "-m", "benchmarks.moe_layer", *_where(record, tiny)]
    _command(record, "experts", "benchmarks.moe_layer", command, deadline)


def _step(record: Record, deadline: float, tiny: bool) -> None:
    _model_step(record, "step", "llama", deadline, tiny)


def _moe_step(record: Record, deadline: float, tiny: bool) -> None:
    _model_step(record, "moe-step", "mixtral", deadline, tiny)


def _model_step(record: Record, part: str, model: str, deadline: float, tiny: bool) -> None:
    options = ["--only", "--step", "--model", model, "--rounds", "7", *_where(record, tiny)]
    _command(
        record, part, "benchmarks.fusions --step", [sys.executable, "-m", "benchmarks.fusions", *options], deadline
    )


def _peers(record: Record, deadline: float, tiny: bool) -> None:
    """Every operation compared with all of its peers, including compiled ones: half an hour on a GPU."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.fusions",
        *(["--only", "rms norm"] if tiny else []),
        *_where(record, tiny),
    ]
    _command(record, "peers", "benchmarks.fusions", command, deadline)


def _where(record: Record, tiny: bool) -> list[str]:
    return ["--quick"] if tiny else ["--out", str(record.file.parent)]


def _one(item: Item) -> list[str]:
    job = f"{correct.case_is_right.__module__}:{correct.case_is_right.__name__}"
    return [sys.executable, "-m", "benchmarks.restartable", job, json.dumps(item.arguments)]


def _command(record: Record, part: str, name: str, command: list[str], deadline: float, **environment: str) -> None:
    """Runs a command until the deadline; adds a line with its exit code and last output, and logs all of the output."""
    log = record.file.with_suffix(f".{part}.{re.sub(r'[^a-z0-9]+', '-', name.lower())}.log")
    with log.open("w") as out:
        try:
            done = subprocess.run(
                command, cwd=_ROOT, env={**os.environ, **environment}, stdout=out, stderr=subprocess.STDOUT,
                timeout=max(1.0, deadline - time.monotonic()), check=False,
            )  # fmt: skip
            failure = f"ended with code {done.returncode}" if done.returncode else None
        except subprocess.TimeoutExpired:
            failure = "not done before its deadline"
    said = log.read_text(errors="replace").strip()[-_LAST_WORDS:]
    record.add(part, {"item": name, "said": said, **({"failure": failure} if failure else {})})


PARTS = {
    "machine": Part(_machine, 30),
    "correct": Part(_correct, 115),
    "failures": Part(_failures, 40),
    "timing": Part(_timing, 165),
    "attention": Part(_attention, 60),
    "losses": Part(_losses, 40),
    "sweeps": Part(_sweeps, 105),
    "host": Part(_host, 50),
    "fp8": Part(_fp8, 30),
    "tests": Part(_tests, 300),
    "train": Part(_train, 120),
    "step": Part(_step, 240),
    "experts": Part(_experts, 120),
    "moe-step": Part(_moe_step, 180),
    "sanitizer": Part(_sanitizer, 180),
    "peers": Part(_peers, 1800),
}
