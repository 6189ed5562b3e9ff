"""``python -m benchmarks.fusions``: compares fused operations with their peers; prints and writes a table."""

import argparse
import json
import logging
import os
import sys
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import SURROUNDED, again_in_surroundings, describe
from benchmarks.fusions.calls import as_markdown as calls_as_markdown
from benchmarks.fusions.calls import measure_calls
from benchmarks.fusions.registry import OPERATIONS
from benchmarks.fusions.report import Run, as_json, as_markdown
from benchmarks.fusions.step import SHAPES, StepFigures, measure_steps
from benchmarks.fusions.step import as_markdown as steps_as_markdown
from benchmarks.fusions.timing import timings

__all__ = ["main"]

log = logging.getLogger(__name__)

RESULTS = Path(__file__).parent.parent / "results"
# bytes of the largest tensor: larger than a CPU's caches; on a GPU launch-bound, in between, and memory-bound
SIZES = {"cpu": [16 << 20], "cuda": [4 << 20, 64 << 20, 1 << 30]}
DTYPES = {"cpu": [torch.float32, torch.bfloat16], "cuda": [torch.bfloat16]}


def main() -> None:
    """Measures the operations named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fusions", description="Fused operations and peers.")
    parser.add_argument("--only", nargs="*", metavar="OPERATION", help="measure only these; may be empty")
    parser.add_argument("--device", choices=SIZES, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds per run (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=1, help="passes over all operations (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="smoke test: small tensors and one round")
    parser.add_argument("--step", action="store_true", help="also a whole training step, with and without fusions")
    parser.add_argument(
        "--model", choices=("llama", "mixtral"), default="llama", help="of the step (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the step (default: %(default)s)"
    )
    parser.add_argument("--calls", action="store_true", help="also the overhead of calls on tiny tensors")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results (default: %(default)s)")
    options = parser.parse_args()
    if options.device == "cpu" and SURROUNDED not in os.environ:  # a GPU's host must not be pinned to one core
        sys.exit(again_in_surroundings("benchmarks.fusions"))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    names = list(OPERATIONS) if options.only is None else options.only
    if unknown := set(names) - OPERATIONS.keys():
        parser.error(f"--only takes {', '.join(OPERATIONS)}; got {', '.join(unknown)}")
    sizes, rounds = ([1 << 16], 1) if options.quick else (SIZES[options.device], options.rounds)
    machine = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "CPU",
        **describe(),
    }
    runs: list[Run] = []
    now = datetime.now()
    tables = [f"{now:%Y-%m-%d %H:%M}, " + ", ".join(f"{name} {value}" for name, value in machine.items()) + "\n"]
    numbers = as_json(runs, machine, now.isoformat())
    file = None if options.quick else options.out / f"fusions-{options.device}-{now:%Y%m%d-%H%M}"
    for _ in range(options.runs if names else 0):
        runs.append(_run(names, options.device, sizes, rounds))
        tables = [as_markdown(runs, machine, f"{now:%Y-%m-%d %H:%M}")]
        numbers = as_json(runs, machine, now.isoformat())
        _keep(file, tables[0], numbers)  # so that an interrupted run keeps its measurements
    if options.step:
        size = "quick" if options.quick else options.device
        shape = SHAPES[size if options.model == "llama" else f"{size} mixtral"]
        shape = replace(shape, dtype=getattr(torch, options.dtype))

        def keep(figures: dict[str, StepFigures]) -> None:
            numbers["steps"] = {name: asdict(one) for name, one in figures.items()}
            _keep(file, "\n".join([*tables, steps_as_markdown(figures, shape)]), numbers)

        tables.append(steps_as_markdown(measure_steps(shape, options.device, rounds, keep), shape))
    if options.calls:
        tables.append(calls_as_markdown(measure_calls(options.device, rounds)))
    _keep(file, "\n".join(tables), numbers)
    print("\n".join(tables))


def _keep(file: Path | None, table: str, numbers: dict[str, Any]) -> None:
    """Writes Markdown and JSON next to each other; does nothing for a quick run, which has no file."""
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    file.with_suffix(".md").write_text(table)
    file.with_suffix(".json").write_text(json.dumps(numbers, indent=1) + "\n")
    log.info("results are in %s.md and .json", file)


def _run(names: list[str], device: str, sizes: list[int], rounds: int) -> Run:
    rows = [
        (name, dtype, num_bytes)
        for name in names
        for dtype in (DTYPES[device] if OPERATIONS[name].typed else DTYPES[device][:1])
        for num_bytes in sizes
    ]
    contests, bandwidths = [], []
    for (name, dtype, num_bytes), (found, bandwidth, seconds) in zip(rows, timings(rows, device, rounds), strict=True):
        contests.append(found)
        bandwidths.append(bandwidth)
        log.info("%s, %s, %d MiB: %.1f s", name, dtype, num_bytes >> 20, seconds)
    return Run(contests, bandwidths)


if __name__ == "__main__":
    main()
