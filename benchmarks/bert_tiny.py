"""Checks that an encoder learns from real text: recipes bert-tiny and classification-tiny.

    python -m benchmarks.bert_tiny FOLDER [SEED ...]

For each seed, on the demo's corpus, in one process on this machine:

    pretraining   recipe bert-tiny; held-out accuracy on masked tokens, compared with predictions from counts
    fine-tuning   recipe classification-tiny, which predicts the standard-library package of a passage: from the
                  pretrained model and from scratch, compared with the most common package and a bag of words

A quarter of each package's files is held out, and as many passages of each package are classified: held out at random,
half of them would be the code tables of ``encodings``, which every classifier knows.

Each step is one micro-batch. That is faster in one process than the recipes' micro-batches, which are small enough for
eight ranks.

The bag of words follows scikit-learn's defaults: a logistic regression (C = 1) on the word counts of a passage, where a
word is two or more letters, digits or underscores, in lower case (CountVectorizer); L-BFGS minimizes its objective.
The bag of tokens is the same on the model's own tokens, which split names like ``xml_parser`` into parts.

Prints a line per seed and writes results.json to FOLDER. Exit code 1 if any seed misses the goals of the recipes. Runs
that are already in FOLDER are not repeated.
"""

import csv
import os
import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from time import perf_counter

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.environment import describe
from benchmarks.recipe_runs import VOCABULARY, prepare_sources, run_main, train
from megalith.data.indexed_dataset import IndexedDataset
from megalith.data.labelled import prepare_labelled
from megalith.data.labelled_dataset import LabelledTexts
from megalith.data.tokenizer import Tokenizer
from megalith.insight.corpus import labelled_passages, split_by_file, standard_library_sources
from megalith.insight.masked_baselines import MaskedBaselines, masked_baselines
from megalith.storage import write_json_atomic
from megalith.training.inference import evaluate_checkpoint, load_model

IntArray = npt.NDArray[np.int64]
_HELD_OUT, _SAMPLES = 0.25, 512
_PACKAGES, _LINES, _TOKENS = 12, 4, 126
_EACH = 100  # training passages per package: pretraining helps most when labels are few
_EACH_HELD_OUT = 200
_WORD = re.compile(r"\b\w\w+\b")


@dataclass(frozen=True)
class Result:
    """Results for one seed: accuracies as fractions, loss in nats per token, minutes of training and its evaluations.

    ``finetuning_minutes`` are those of the run from the pretrained model.
    """

    seed: int
    masked_accuracy: float
    masked_loss: float
    from_pretrained: float
    from_scratch: float
    minutes: float
    finetuning_minutes: float

    def holds(self, guessing: MaskedBaselines, without: "WithoutAModel") -> bool:
        """Whether the recipes meet their goals."""
        learned = self.masked_accuracy > max(guessing.unigram_accuracy, guessing.bigram_accuracy)
        return learned and self.from_pretrained > max(self.from_scratch, without.commonest, without.bag_of_words)


@dataclass(frozen=True)
class WithoutAModel:
    """Held-out accuracies of the most common package, and of logistic regressions on counts."""

    commonest: float
    bag_of_words: float
    bag_of_tokens: float


def main(folder: Path, seeds: list[int]) -> int:
    """Returns the exit code."""
    text, passages = _texts(folder / "data")
    without = _without_a_model(passages, folder / "data")
    results: list[Result] = []
    holds = True
    for seed in seeds:
        pretrained = folder / f"seed-{seed}" / "pretrained"
        minutes = _minutes("bert-tiny", pretrained, seed, text, "train.micro_batch_size=16")
        guessing = _guessing(pretrained, text)
        [masked] = evaluate_checkpoint(pretrained, None, _SAMPLES)
        tuned = [_finetune(folder / f"seed-{seed}", seed, passages, start) for start in (pretrained, None)]
        (from_pretrained, finetuning_minutes), (from_scratch, _) = tuned
        accuracies = masked.means["mlm_accuracy"], masked.loss, from_pretrained, from_scratch
        results.append(Result(seed, *accuracies, minutes, finetuning_minutes))
        holds = holds and results[-1].holds(guessing, without)
        print(results[-1], "holds" if results[-1].holds(guessing, without) else "FAILS", flush=True)
        print(f"  {guessing}; {without}", flush=True)
        write_json_atomic(
            folder / "results.json",
            {
                "machine": describe(),
                "guessing": asdict(guessing),
                "without_a_model": asdict(without),
                "results": [asdict(found) for found in results],
            },
        )
    return 0 if holds else 1


def _texts(folder: Path) -> tuple[str, str]:
    """The prefixes of the text and of the passages; the held-out parts have the same prefixes plus -valid."""
    kept, held_out = _split_by_package(standard_library_sources())
    found = prepare_sources(folder / "text", kept, held_out, split_sentences=True, special_tokens=["bert"])
    out = folder / "passages"
    if not out.with_suffix(".idx").exists():
        for name, rows in zip(("train", "valid"), _passages(kept, held_out), strict=True):
            with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows([("text", "label"), *rows])
        classes = prepare_labelled(folder / "train.csv", out, found.tokenizer, max_tokens=_TOKENS).classes
        prepare_labelled(folder / "valid.csv", f"{out}-valid", found.tokenizer, classes=classes, max_tokens=_TOKENS)
    return str(found.prefix), str(out)


def _split_by_package(files: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """(train, held out): the fraction ``_HELD_OUT`` of the files of each package, and of those outside of packages."""
    root = Path(os.path.commonpath([path.parent for path in files]))
    kept: list[Path] = []
    held_out: list[Path] = []
    for _, group in groupby(sorted(files, key=_package_below(root)), _package_below(root)):
        together = list(group)
        parts = split_by_file(together, _HELD_OUT, seed=0) if len(together) > 1 else (together, [])
        kept += parts[0]
        held_out += parts[1]
    return kept, held_out


def _package_below(root: Path) -> Callable[[Path], str]:
    return lambda path: path.relative_to(root).parts[0] if path.parent != root else ""


def _passages(kept: Sequence[Path], held_out: Sequence[Path]) -> list[list[tuple[str, str]]]:
    """Training and held-out (passage, package): as many of each of the largest packages that have enough of both."""
    random, groups = np.random.default_rng(0), []
    for files in (kept, held_out):
        groups.append({name: list(rows) for name, rows in groupby(labelled_passages(files, 99, _LINES), itemgetter(1))})
    learned, valid = groups
    enough = [name for name in learned if len(learned[name]) >= _EACH and len(valid.get(name, ())) >= _EACH_HELD_OUT]
    chosen = sorted(sorted(enough, key=lambda name: -len(learned[name]))[:_PACKAGES])
    if len(chosen) < _PACKAGES:
        raise SystemExit(
            f"{_PACKAGES} packages of the standard library must have {_EACH} passages and {_EACH_HELD_OUT} held-out "
            f"ones; found {len(chosen)}: {', '.join(chosen)}; use a full Python"
        )
    return [
        [rows[place] for rows in map(group.get, chosen) if rows for place in random.permutation(len(rows))[:number]]
        for group, number in ((learned, _EACH), (valid, _EACH_HELD_OUT))
    ]


def _minutes(recipe: str, run: Path, seed: int, text: str, *overrides: str) -> float:
    """Trains the recipe and returns the minutes it took; NaN if the run already existed."""
    started, was_there = perf_counter(), (run / "checkpoints").exists()
    train(1, recipe, run, [f"data.train={text}", f"data.valid={text}-valid", f"train.seed={seed}", *overrides])
    return float("nan") if was_there else (perf_counter() - started) / 60


def _finetune(folder: Path, seed: int, passages: str, start: Path | None) -> tuple[float, float]:
    """Held-out accuracy and minutes of a classifier that starts from the run ``start``, or from random weights."""
    run = folder / ("from-scratch" if start is None else "from-pretrained")
    overrides = [f"model.bert.num_classes={_PACKAGES}", "train.micro_batch_size=32"]
    overrides += [] if start is None else ["--from", str(start)]
    minutes = _minutes("classification-tiny", run, seed, passages, *overrides)
    [found] = evaluate_checkpoint(run, None, None)
    return found.means["accuracy"], minutes


def _guessing(run: Path, text: str) -> MaskedBaselines:
    held_out = load_model(run).task.evaluation_dataset(f"{text}-valid")
    number = min(_SAMPLES, len(held_out))
    samples = [held_out[place * len(held_out) // number] for place in range(number)]
    return masked_baselines(IndexedDataset(text), samples, VOCABULARY)


def _without_a_model(passages: str, folder: Path) -> WithoutAModel:
    tokenizer = Tokenizer.load(folder / "text-tokenizer.json")
    learned, valid = (LabelledTexts(prefix, tokenizer, _TOKENS + 2) for prefix in (passages, f"{passages}-valid"))
    by_words = [_words(folder / f"{name}.csv") for name in ("train", "valid")]
    by_tokens = [[Counter(texts[place].tokens.tolist()) for place in range(len(texts))] for texts in (learned, valid)]
    found = [_regression(*each, learned.labels, valid.labels) for each in (by_words, by_tokens)]
    return WithoutAModel(float(np.mean(valid.labels == np.bincount(learned.labels).argmax())), *found)


def _words(path: Path) -> list[Counter[Hashable]]:
    """The word counts of each text in a file."""
    with path.open(encoding="utf-8", newline="") as file:
        return [Counter(_WORD.findall(text.lower())) for text, _ in list(csv.reader(file))[1:]]


def _regression(
    train: Sequence[Counter[Hashable]], valid: Sequence[Counter[Hashable]], labels: IntArray, wanted: IntArray
) -> float:
    """The held-out accuracy of a logistic regression on counts; ``labels`` [N] belong to ``train``."""
    place_of = {word: place for place, word in enumerate(dict.fromkeys(word for counts in train for word in counts))}

    def counted(texts: Sequence[Counter[Hashable]]) -> Tensor:
        counts = torch.zeros(len(texts), len(place_of), dtype=torch.float64)
        for row, text in zip(counts, texts, strict=True):
            known = [word for word in text if word in place_of]
            row[[place_of[word] for word in known]] = torch.tensor([text[word] for word in known], dtype=row.dtype)
        return counts

    x, y = counted(train), torch.from_numpy(labels)
    weight = torch.zeros(len(place_of), int(y.max()) + 1, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(weight.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=300, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        penalty = weight.square().sum() / (2 * len(y))  # C = 1, applied to the sum over all texts as in scikit-learn
        found = torch.nn.functional.cross_entropy(x @ weight + bias, y) + penalty
        found.backward()
        return found

    optimizer.step(loss)
    found = (counted(valid) @ weight + bias).argmax(-1) == torch.from_numpy(wanted)
    return float(found.double().mean())


if __name__ == "__main__":
    run_main(main, __doc__)
