"""What the benchmarks of recipes share: their text, their runs on ranks of this machine, their command line."""

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from megalith.data.prepare import PrepareSummary, prepare
from megalith.insight.corpus import split_by_file, standard_library_sources
from megalith.resilience.launch import launch
from megalith.training.resume import where_it_goes_on

__all__ = ["VOCABULARY", "prepare_sources", "run_main", "train"]

VOCABULARY = 2048


def prepare_sources(
    out: Path, *, held_out: float, split_sentences: bool = False, special_tokens: Sequence[str] = ()
) -> PrepareSummary:
    """The sources of the standard library as a dataset, the share ``held_out`` of its files apart."""
    kept, valid = split_by_file(standard_library_sources(), held_out, seed=0)
    return prepare(
        kept,
        out,
        vocab_size=VOCABULARY,
        valid=valid,
        split_sentences=split_sentences,
        special_tokens=special_tokens,
        processes=os.cpu_count() or 1,
    )


def train(num_ranks: int, recipe: str, run: Path, overrides: Sequence[str]) -> None:
    """``megalith train RECIPE`` on this machine; what is in ``run`` already is not trained again."""
    arguments, on = ["train", recipe, *overrides, f"run={run}"], partial(where_it_goes_on, run / "checkpoints")
    if code := launch(num_ranks, arguments, run.parent / "logs", print, goes_on=on):
        raise SystemExit(f"megalith {' '.join(arguments)} ended with exit code {code}")


def run_main(main: Callable[[Path, list[int]], int], usage: str | None) -> None:
    """Calls ``main`` with the folder and the seeds of the command line, by default 1, 2 and 3, and exits as it says."""
    if len(sys.argv) < 2:
        raise SystemExit(usage)
    sys.exit(main(Path(sys.argv[1]), [int(seed) for seed in sys.argv[2:]] or [1, 2, 3]))
