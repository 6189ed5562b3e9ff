"""Checks that an embedding model learns from real text: recipe embedding-tiny.

    python -m benchmarks.embedding_tiny FOLDER [SEED ...]

For each seed, on the functions of Python's standard library, in one process on this machine:

    pretraining   recipe bert-tiny, on nine tenths of the files
    fine-tuning   recipe embedding-tiny: the summary of a function's docstring finds its code, without the docstring;
                  from the pretrained model and from scratch

The code of each function in the other tenth of the files is searched among that of all of them. The results are
compared with BM25 on the same functions, which reads the whole code and not only the tokens that fit in a row.

Prints a line per seed and writes results.json to FOLDER. Exit code 1 unless a model from a pretrained encoder is better
than from scratch. Runs that are already in FOLDER are not repeated.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import numpy as np

from benchmarks.bm25 import places_by_bm25
from benchmarks.environment import describe
from benchmarks.recipe_runs import prepare_sources, run_main, train
from megalith.data.pairs.prepare import prepare_pairs
from megalith.insight.corpus import documented_functions, split_by_file, standard_library_sources
from megalith.storage import write_json_atomic
from megalith.training.inference import evaluate_checkpoint

_HELD_OUT = 0.1
_QUERY, _PASSAGE, _ROW = 30, 94, 128  # tokens; special tokens are not counted in the first two


@dataclass(frozen=True)
class Found:
    """Shares of the queries whose passage is among the first 1, 5 and 20, and the mean reciprocal rank."""

    top_1: float
    top_5: float
    top_20: float
    mrr: float


@dataclass(frozen=True)
class Result:
    """Results for one seed; ``minutes`` are those of fine-tuning the pretrained model."""

    seed: int
    from_pretrained: Found
    from_scratch: Found
    minutes: float

    def holds(self) -> bool:
        """Whether the recipe meets its goal."""
        return self.from_pretrained.mrr > self.from_scratch.mrr


def main(folder: Path, seeds: list[int]) -> int:
    """Returns the exit code."""
    text, pairs, held_out = _data(folder / "data")
    queries, passages = zip(*held_out, strict=True)
    bm25 = _found_at(places_by_bm25(queries, passages))
    results: list[Result] = []
    for seed in seeds:
        pretrained = folder / f"seed-{seed}" / "pretrained"
        overrides = [f"data.train={text}", f"data.valid={text}-valid", f"train.seed={seed}"]
        train(1, "bert-tiny", pretrained, [*overrides, "train.micro_batch_size=16"])
        (from_pretrained, minutes), (from_scratch, _) = (
            _finetune(folder / f"seed-{seed}", seed, pairs, start) for start in (pretrained, None)
        )
        results.append(Result(seed, from_pretrained, from_scratch, minutes))
        print(results[-1], "holds" if results[-1].holds() else "FAILS", flush=True)
        print(f"  BM25: {bm25}, of {len(held_out)} functions", flush=True)
        write_json_atomic(
            folder / "results.json",
            {
                "machine": describe(),
                "held_out": len(held_out),
                "bm25": asdict(bm25),
                "results": [asdict(each) for each in results],
            },
        )
    return 0 if all(result.holds() for result in results) else 1


def _data(folder: Path) -> tuple[Path, Path, list[tuple[str, str]]]:
    """The prefixes of the text and of the pairs, and the held-out functions."""
    parts = split_by_file(standard_library_sources(), _HELD_OUT, seed=0)
    text = prepare_sources(folder / "text", *parts, split_sentences=True, special_tokens=["bert"])
    kept, held_out = map(documented_functions, parts)
    out = folder / "pairs"
    if not out.with_suffix(".idx").exists():
        files = [_written(folder / f"{name}.jsonl", rows) for name, rows in (("train", kept), ("valid", held_out))]
        limits = {"max_query_tokens": _QUERY, "max_passage_tokens": _PASSAGE}
        prepare_pairs(files[:1], out, text.tokenizer, valid=files[1:], **limits)
    return text.prefix, out, held_out


def _written(file: Path, functions: Sequence[tuple[str, str]]) -> Path:
    lines = (json.dumps({"query": summary, "positive": code}) + "\n" for summary, code in functions)
    file.write_text("".join(lines), encoding="utf-8")
    return file


def _finetune(folder: Path, seed: int, pairs: Path, start: Path | None) -> tuple[Found, float]:
    """What a model finds that starts from the run ``start``, or from random weights, and the minutes of training."""
    run = folder / ("from-scratch" if start is None else "from-pretrained")
    overrides = [f"data.train={pairs}", f"data.valid={pairs}-valid", f"data.seq_length={_ROW}", f"train.seed={seed}"]
    overrides += ["train.micro_batch_size=64", *([] if start is None else ["--from", str(start)])]
    started, was_there = perf_counter(), (run / "checkpoints").exists()
    train(1, "embedding-tiny", run, overrides)
    minutes = float("nan") if was_there else (perf_counter() - started) / 60
    [found] = evaluate_checkpoint(run, None, None)
    return Found(*(found.means[f"top_{k}_accuracy"] for k in (1, 5, 20)), found.means["mrr"]), minutes


def _found_at(places: np.ndarray) -> Found:
    return Found(*(float(np.mean(places <= k)) for k in (1, 5, 20)), float(np.mean(1 / places)))


if __name__ == "__main__":
    run_main(main, __doc__)
