"""``python -m benchmarks``: runs the cases, prints their tables, and writes them to a folder."""

import argparse
import json
import logging
from datetime import datetime
from pathlib import Path

from benchmarks.case import Case
from benchmarks.environment import describe
from benchmarks.measure import measure
from benchmarks.registry import CASES
from benchmarks.report import as_json, as_markdown

__all__ = ["contenders_of", "main"]

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Runs the cases named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Compares Megalith with its peers.")
    parser.add_argument("--case", choices=CASES, help="one case instead of all")
    parser.add_argument("--rounds", type=int, default=9, help="quiet rounds to collect (default: %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="contenders with products in it, and the base")
    parser.add_argument("--quick", action="store_true", help="smoke test: a tiny size and one round")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results (default: %(default)s)")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1; got {options.rounds}")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    size, rounds = ("quick", 1) if options.quick else ("full", options.rounds)
    for name in [options.case] if options.case else CASES:
        _run(name, size, rounds, options.dtype, options.out)


def contenders_of(case: Case, dtype: str | None) -> list[str]:
    """The base of ``case``, and the contenders with matrix products in ``dtype``, or all if it is None."""
    return [name for name, one in case.contenders.items() if name == case.base or dtype in (None, one.matmuls)]


def _run(name: str, size: str, rounds: int, dtype: str | None, folder: Path) -> None:
    measurement = measure(name, size, rounds, contenders_of(CASES[name], dtype))
    machine, now = describe(), datetime.now()
    table = as_markdown(measurement, machine, f"{now:%Y-%m-%d %H:%M}")
    print(table)
    if size == "quick":
        return  # shows that it runs; its timings mean nothing
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}-{now:%Y%m%d-%H%M}"
    file.with_suffix(".md").write_text(table)
    file.with_suffix(".json").write_text(json.dumps(as_json(measurement, machine, now.isoformat()), indent=1) + "\n")
    logging.info("results are in %s.md and .json", file)


if __name__ == "__main__":
    main()
