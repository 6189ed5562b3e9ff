"""Checks that an encoder-decoder learns from real text: recipe t5-tiny.

    python -m benchmarks.t5_tiny FOLDER [SEED ...]

For each seed, the recipe is trained on the demo's corpus, in one process on this machine. The accuracy on the missing
tokens of held-out texts, each predicted from the correct tokens before it, is compared with predictions from counts:
the most frequent token, and the token that most often follows the one before it in the text.

Prints a line per seed and writes results.json to FOLDER. Exit code 1 if any seed is no better than the most frequent
token: beating it is the goal in so few steps. Runs that are already in FOLDER are not repeated.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from benchmarks.environment import describe
from benchmarks.recipe_runs import VOCABULARY, prepare_sources, run_main, train
from megalith.data.indexed_dataset import IndexedDataset
from megalith.data.special_tokens import T5Tokens, t5_tokens
from megalith.data.t5_dataset import T5Sample, fill_spans
from megalith.data.tokenizer import Tokenizer
from megalith.insight.corpus import split_by_file, standard_library_sources
from megalith.insight.masked_baselines import MaskedBaselines, masked_baselines
from megalith.storage import write_json_atomic
from megalith.training.inference import evaluate_checkpoint, load_model

_HELD_OUT, _SAMPLES = 0.1, 512


@dataclass(frozen=True)
class Result:
    """Results for one seed: accuracy as a fraction, loss in nats per token, and the minutes of training."""

    seed: int
    span_accuracy: float
    loss: float
    minutes: float

    def holds(self, guessing: MaskedBaselines) -> bool:
        """Whether the recipe meets its goal."""
        return self.span_accuracy > guessing.unigram_accuracy


@dataclass(frozen=True)
class _Filled:
    """A text with its missing tokens filled in, in the format of ``masked_baselines``."""

    labels: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]


def main(folder: Path, seeds: list[int]) -> int:
    """Returns the exit code."""
    prefix = folder / "data" / "text"
    parts = split_by_file(standard_library_sources(), _HELD_OUT, seed=0)
    text = prepare_sources(prefix, *parts, split_sentences=True, special_tokens=["t5"])
    results: list[Result] = []
    holds = True
    for seed in seeds:
        run = folder / f"seed-{seed}" / "t5"
        started, was_there = perf_counter(), (run / "checkpoints").exists()
        overrides = [f"data.train={prefix}", f"data.valid={text.valid_prefix}", f"train.seed={seed}"]
        train(1, "t5-tiny", run, [*overrides, "train.micro_batch_size=32"])  # the whole step
        minutes = float("nan") if was_there else (perf_counter() - started) / 60
        [found] = evaluate_checkpoint(run, None, _SAMPLES)
        guessing = _guessing(run, prefix)
        results.append(Result(seed, found.means["span_accuracy"], found.loss, minutes))
        holds = holds and results[-1].holds(guessing)
        print(results[-1], guessing, "holds" if results[-1].holds(guessing) else "FAILS", flush=True)
        write_json_atomic(
            folder / "results.json",
            {"machine": describe(), "guessing": asdict(guessing), "results": [asdict(each) for each in results]},
        )
    return 0 if holds else 1


def _guessing(run: Path, prefix: Path) -> MaskedBaselines:
    held_out = load_model(run).task.evaluation_dataset(f"{prefix}-valid")
    special = t5_tokens(Tokenizer.load(f"{prefix}-tokenizer.json"))
    number = min(_SAMPLES, len(held_out))
    samples = [_filled(held_out[place * len(held_out) // number], special) for place in range(number)]
    return masked_baselines(IndexedDataset(prefix), samples, VOCABULARY)


def _filled(sample: T5Sample, special: T5Tokens) -> _Filled:
    text, is_missing = fill_spans(sample, special)
    return _Filled(np.roll(text, 1), np.roll(is_missing, 1))  # the token before the text is the end of another


if __name__ == "__main__":
    run_main(main, __doc__)
