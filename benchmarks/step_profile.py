"""Where the time of a training step goes: the step of ``python -m benchmarks --case step``, by kind of work.

    python -m benchmarks.step_profile
    python -m benchmarks.step_profile --contender "Hugging Face, bfloat16" --steps 8

One contender, by default Megalith as trained, runs alone in the environment of the benchmarks. An event of torch's
profiler counts without the events inside it, for the kind of work that it belongs to. The profiler itself adds to
small events, so the sum is larger than an unprofiled step, which is printed too.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.case import Runner
from benchmarks.environment import SURROUNDED, again_in_surroundings, describe
from benchmarks.step import CASE

__all__ = ["as_markdown", "kind_of", "main", "milliseconds_by_kind"]

_PRODUCTS = "products of linear layers"
_ATTENTION = "attention"
# (part of an event's name, kind of work): the first that an event, or one around it, contains
_KINDS = (
    ("attention", _ATTENTION),
    ("scaled_dot", _ATTENTION),
    ("flash", _ATTENTION),
    ("aten::mm", _PRODUCTS),
    ("aten::addmm", _PRODUCTS),
    ("aten::linear", _PRODUCTS),
    ("_linear_pointwise", _PRODUCTS),
    ("Optimizer", "optimizer"),
    ("adamw", "optimizer"),
    ("FSDP", "FSDP2"),
    ("reduce_scatter", "FSDP2"),
    ("all_gather", "FSDP2"),
    ("c10d", "FSDP2"),
    ("cross_entropy", "loss"),
    ("norm", "norms"),
    ("glu", "gated unit"),
    ("rope", "rotary embedding"),
    ("embedding", "embedding"),
)


def main() -> None:
    """Profiles a contender and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_profile", description="Where a step's time goes.")
    parser.add_argument(
        "--contender",
        choices=CASE.contenders,
        default="Megalith, bfloat16 over float32 (as trained)",
        metavar="NAME",
        help="a row of the table of --case step (default: %(default)s)",
    )
    parser.add_argument("--steps", type=int, default=5, help="profiled steps (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="smoke test: a tiny size")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps must be at least 1; got {options.steps}")
    if SURROUNDED not in os.environ:
        sys.exit(again_in_surroundings("benchmarks.step_profile"))
    with tempfile.TemporaryDirectory() as folder:
        size = CASE.sizes["quick" if options.quick else "full"]
        CASE.prepare(size, Path(folder))
        runner = CASE.contenders[options.contender].build(size, Path(folder))
        runner.first()
        plain = statistics.median(_seconds(runner) for _ in range(3 + options.steps))
        found = milliseconds_by_kind(runner, options.steps)
    print(as_markdown(options.contender, found, plain * 1e3, describe()))


def milliseconds_by_kind(runner: Runner, num_steps: int) -> dict[str, float]:
    """Milliseconds of a step on the CPU by kind of work, most first, as a mean over ``num_steps``."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(num_steps):
            runner.run()
    found = Counter[str]()
    for event in profiled.events() or ():
        found[kind_of(_names(event))] += event.self_cpu_time_total / num_steps / 1e3
    return dict(found.most_common())


def kind_of(names: Iterable[str]) -> str:
    """The kind of work of an event, from its own name and the names of those around it."""
    chain = list(names)
    return next((kind for part, kind in _KINDS if any(part in name for name in chain)), "other")


def as_markdown(contender: str, found: Mapping[str, float], plain: float, machine: Mapping[str, str]) -> str:
    """Table of ``found`` with shares, the share of all but products and attention, and the machine."""
    total = sum(found.values())
    rest = total - found.get(_PRODUCTS, 0.0) - found.get(_ATTENTION, 0.0)
    rows = [f"| {kind} | {spent:.1f} | {spent / total:.1%} |" for kind, spent in found.items()]
    return "\n".join(
        [
            f"## {contender}: a step of {plain:.0f} ms, {total:.0f} ms with the profiler",
            "",
            "| kind of work | ms | share |",
            "| --- | --- | --- |",
            *rows,
            "",
            f"All but products and attention: {rest:.0f} ms, {rest / total:.1%}.",
            "",
            ", ".join(f"{name} {value}" for name, value in machine.items()),
        ]
    )


def _seconds(runner: Runner) -> float:
    began = perf_counter()
    runner.run()
    return perf_counter() - began


def _names(event: Any) -> Iterator[str]:
    """The names of a profiler's event and of those around it, innermost first."""
    while event is not None:
        yield event.name
        event = event.cpu_parent


if __name__ == "__main__":
    main()
