"""``python -m benchmarks``: runs the cases, prints their tables, and keeps them in a folder."""

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
    """Runs the cases that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Peers side by side in one run.")
    parser.add_argument("--case", choices=CASES, help="one case instead of all")
    parser.add_argument("--rounds", type=int, default=9, help="quiet rounds to collect (default: %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="contenders with products in it, and the base")
    parser.add_argument("--quick", action="store_true", help="a tiny size and one round: does everything still run?")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of results (default: %(default)s)")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1; got {options.rounds}")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    size, rounds = ("quick", 1) if options.quick else ("full", options.rounds)
    for name in [options.case] if options.case else CASES:
        _run(name, size, rounds, options.dtype, options.out)


def contenders_of(case: Case, dtype: str | None) -> list[str]:
    """The base of ``case``, and those whose matrix products are in ``dtype``; None: all."""
    return [name for name, one in case.contenders.items() if name == case.base or dtype in (None, one.matmuls)]


def _run(name: str, size: str, rounds: int, dtype: str | None, folder: Path) -> None:
    measurement = measure(name, size, rounds, contenders_of(CASES[name], dtype))
    machine, now = describe(), datetime.now()
    table = as_markdown(measurement, machine, f"{now:%Y-%m-%d %H:%M}")
    print(table)
    if size == "quick":
        return  # says that it runs, and nothing about speed
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}-{now:%Y%m%d-%H%M}"
    file.with_suffix(".md").write_text(table)
    file.with_suffix(".json").write_text(json.dumps(as_json(measurement, machine, now.isoformat()), indent=1) + "\n")
    logging.info("kept in %s.md and .json", file)


if __name__ == "__main__":
    main()
