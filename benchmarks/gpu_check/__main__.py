"""``python -m benchmarks.gpu_check``: what a GPU is to be asked first, in one command; ``make gpu-check`` calls it."""

import argparse
from pathlib import Path

import torch

from benchmarks.gpu_check.parts import PARTS, run_parts
from benchmarks.gpu_check.record import Record

__all__ = ["main"]

RESULTS = Path(__file__).parent.parent / "results"
_BUDGET = 600.0


def main() -> None:
    """Runs the parts, writes what they say as they say it, and prints the page at the end."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description="The first minutes on a GPU.")
    parser.add_argument("--budget", type=float, default=_BUDGET, help="seconds for all (default: %(default)g)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="some instead of all, in order")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, in Triton's interpreter: does everything run?")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of results (default: %(default)s)")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        parser.error("there is no GPU; --tiny runs everything on a CPU, at sizes that say nothing about speed")
    record = Record(options.out, "tiny" if options.tiny else "cuda", options.budget)
    run_parts(record, options.parts, options.budget, options.tiny)
    print(record.page())
    print(f"kept in {record.file} and .md")


if __name__ == "__main__":
    main()
