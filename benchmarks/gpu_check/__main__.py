"""``python -m benchmarks.gpu_check``: the first checks and timings on a GPU; ``make gpu-check`` calls it."""

import argparse
from pathlib import Path

import torch

from benchmarks.gpu_check.parts import PARTS, run_parts
from benchmarks.gpu_check.record import Record

__all__ = ["main"]

RESULTS = Path(__file__).parent.parent / "results"
_BUDGET = 600.0


def main() -> None:
    """Runs the parts, writes their results as they arrive, and prints the page at the end."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description="The first minutes on a GPU.")
    parser.add_argument("--budget", type=float, default=_BUDGET, help="total seconds (default: %(default)g)")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="only these parts, in this order"
    )
    parser.add_argument("--tiny", action="store_true", help="smoke test on a CPU, in Triton's interpreter")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results (default: %(default)s)")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        parser.error("there is no GPU; --tiny runs everything on a CPU, at sizes too small to measure speed")
    record = Record(options.out, "tiny" if options.tiny else "cuda", options.budget)
    run_parts(record, options.parts, options.budget, options.tiny)
    print(record.page())
    print(f"results are in {record.file} and .md")


if __name__ == "__main__":
    main()
