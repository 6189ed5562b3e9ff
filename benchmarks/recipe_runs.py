"""Shared by the recipe benchmarks: text, runs on local ranks, command line."""

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from megalith.data.prepare import PrepareSummary, prepare
from megalith.resilience.launch import launch
from megalith.training.resume import where_it_goes_on

__all__ = ["VOCABULARY", "prepare_sources", "run_main", "train"]

VOCABULARY = 2048


def prepare_sources(
    out: Path,
    kept: Sequence[Path],
    held_out: Sequence[Path],
    *,
    split_sentences: bool = False,
    special_tokens: Sequence[str] = (),
) -> PrepareSummary:
    """The files ``kept`` as a dataset, and those ``held_out`` as another."""
    return prepare(
        kept,
        out,
        vocab_size=VOCABULARY,
        valid=held_out,
        split_sentences=split_sentences,
        special_tokens=special_tokens,
        processes=os.cpu_count() or 1,
    )


def train(num_ranks: int, recipe: str, run: Path, overrides: Sequence[str]) -> None:
    """Runs ``megalith train RECIPE`` on this machine; steps that are already in ``run`` are not repeated."""
    arguments, on = ["train", recipe, *overrides, f"run={run}"], partial(where_it_goes_on, run / "checkpoints")
    if code := launch(num_ranks, arguments, run.parent / "logs", print, goes_on=on):
        raise SystemExit(f"megalith {' '.join(arguments)} failed with exit code {code}")


def run_main(main: Callable[[Path, list[int]], int], usage: str | None) -> None:
    """Calls ``main`` with the folder and seeds (default: 1, 2, 3) of the command line; exits with its return code."""
    if len(sys.argv) < 2:
        raise SystemExit(usage)
    sys.exit(main(Path(sys.argv[1]), [int(seed) for seed in sys.argv[2:]] or [1, 2, 3]))
