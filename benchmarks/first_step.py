"""Times the start of a run: from the start of the process to the end of its first step.

    python -m benchmarks.first_step               # ten minutes
    python -m benchmarks.first_step --rounds 1

Recipe llama-28m in bfloat16, 8 rows of 512 random tokens a step, on this machine's CPU, with an empty compile cache
(headers included), with the cache of a run in the same layout, and with that of another layout. Rounds are interleaved.
The table gives the median seconds of each kind of start and those of every round; it is printed, and saved in
``benchmarks/results`` (``--out``) as ``first-step-<date>.md``. A busy machine makes any start longer.
"""

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from time import perf_counter

import numpy as np

from benchmarks.environment import describe
from megalith.data.indexed_dataset import IndexedDatasetBuilder

__all__ = ["STARTS", "Start", "as_markdown", "main", "seconds_to_first_step"]

RESULTS = Path(__file__).parent / "results"
_FIRST_STEP = re.compile(r"^step 1/")
_SETTINGS = (
    "train.steps=2",
    "train.global_batch_size=8",
    "train.log_every=1",
    "optim.warmup_steps=1",
    "checkpoint.every=1000",
)
_SHARDED, _TENSOR = ("--nproc", "2", "parallel.shard=2"), ("--nproc", "2", "parallel.tensor=2")


@dataclass(frozen=True)
class Start:
    """A way to start a run. With ``empties_cache`` it begins with an empty cache, which the next ones find filled."""

    name: str
    arguments: Sequence[str] = ()
    empties_cache: bool = False
    compiles: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)


# in the order of a round
STARTS = (
    Start("one rank, empty cache", empties_cache=True),
    Start("one rank, full cache"),
    Start("two ranks (shard), with the cache of one", _SHARDED),
    Start("two ranks (tensor), with the cache of other layouts", _TENSOR),
    Start("two ranks (shard), empty cache", _SHARDED, empties_cache=True),
    Start("short run, which does not compile by default", compiles=False),
    Start("TORCH_COMPILE_DISABLE=1", environment={"TORCH_COMPILE_DISABLE": "1"}),
)


def main() -> None:
    """Measures all starts and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_step", description="Times the start of a run.")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of all starts (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results (default: %(default)s)")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1; got {options.rounds}")
    found: dict[str, list[float]] = {start.name: [] for start in STARTS}
    with tempfile.TemporaryDirectory(prefix="first-step-") as folder:
        for number in range(options.rounds):
            for start in STARTS:
                found[start.name].append(seconds_to_first_step(start, Path(folder)))
                print(f"round {number + 1}: {start.name}: {found[start.name][-1]:.1f} s", file=sys.stderr, flush=True)
    now = datetime.now()
    table = as_markdown(found, describe(), f"{now:%Y-%m-%d %H:%M}")
    print(table)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"first-step-{now:%Y%m%d-%H%M}.md").write_text(table)


def seconds_to_first_step(start: Start, folder: Path, recipe: str = "llama-28m") -> float:
    """Runs two steps of ``recipe`` with data, run and cache in ``folder``; raises RuntimeError if the run fails."""
    cache = folder / "cache"
    if start.empties_cache:
        shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir(exist_ok=True)
    shutil.rmtree(folder / "run", ignore_errors=True)
    compiling = ["train.compile_fusions=true"] if start.compiles else []
    paths = [f"data.train={_data(folder / 'text')}", f"run={folder / 'run'}"]
    command = [sys.executable, "-u", "-m", "megalith", "train", recipe, *paths, *_SETTINGS, *compiling]
    # torch keeps compiled code, and the headers that it has compiled, in the folder for temporary files
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    environment |= {"TMPDIR": str(cache), "CUDA_VISIBLE_DEVICES": "", **start.environment}
    seconds, lines, began = None, [], perf_counter()
    with subprocess.Popen(
        [*command, *start.arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as program:
        assert program.stdout is not None
        for line in program.stdout:
            if seconds is None and _FIRST_STEP.match(line):
                seconds = perf_counter() - began
            lines.append(line)
    if program.returncode or seconds is None:
        raise RuntimeError(f"{start.name}: exit code {program.returncode}\n{''.join(lines)}")
    return seconds


def as_markdown(found: Mapping[str, Sequence[float]], machine: Mapping[str, str], date: str) -> str:
    """Title, table of ``found`` (seconds of each round by start), and the machine."""
    rows = [
        f"| {name} | {statistics.median(seconds):.1f} | {', '.join(f'{each:.1f}' for each in seconds)} |"
        for name, seconds in found.items()
    ]
    title = f"## From the start of the process to the end of the first step, llama-28m in bfloat16, {date}"
    about = ", ".join(f"{name} {value}" for name, value in machine.items())
    return "\n".join([title, "", "| start | median, s | each round, s |", "| --- | --- | --- |", *rows, "", about, ""])


def _data(prefix: Path, vocab_size: int = 2048) -> Path:
    """A dataset of random tokens, written unless it exists."""
    if not prefix.with_suffix(".idx").exists():
        tokens = np.random.default_rng(0).integers(1, vocab_size, (16, 1025))
        with IndexedDatasetBuilder(prefix, np.uint16) as builder:
            for row in tokens:
                builder.add_document(np.append(row, 0))
            builder.finalize(vocab_size=vocab_size, eod=0)
    return prefix


if __name__ == "__main__":
    main()
