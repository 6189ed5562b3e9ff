"""The demo: a complete training run on text that every machine has, with a layout change midway.

1  collects the source of this Python's standard library, and holds out some files
2  trains a byte-level BPE tokenizer of 2,048 entries, and writes both parts as .bin/.idx datasets
3  probes which dtype is fastest on this machine
4  trains a Llama of four million parameters on 1.5 million tokens on two ranks: 80 % data parallel, then resumed with
   tensor parallelism; on a machine with a single GPU, on one rank in both parts
5  compares the held-out loss with n-gram models of the same data, generates samples, writes report.html
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

import torch

from megalith.config import load_run
from megalith.data.indexed_dataset import IndexedDataset
from megalith.data.prepare import prepare
from megalith.errors import MegalithError
from megalith.insight.baselines import BaselineLosses, baseline_losses
from megalith.insight.corpus import split_by_file, standard_library_sources
from megalith.insight.probe import probe_dtype
from megalith.insight.report import write_report
from megalith.models.sampling import Sampling
from megalith.observe.machine import num_cores
from megalith.observe.units import duration
from megalith.resilience.launch import launch
from megalith.storage.atomic import write_json_atomic
from megalith.training.inference import CheckpointLoss, evaluate_checkpoint
from megalith.training.resume import where_it_goes_on
from megalith.training.tasks.generation import TextGenerator

__all__ = ["DemoError", "DemoResult", "run_demo"]

_RECIPE = "llama-4m"
_VOCABULARY = 2048
_HELD_OUT = 0.05
_BATCH, _SEQUENCE, _STEPS = 16, 256, 366  # 1.5 million tokens
_STEPS_BEFORE_CHANGE = 293  # 80 %
_PROMPTS = ("def ", "class Queue:\n", "import os\n\n", '    """Return ')


class DemoError(MegalithError, RuntimeError):
    """A command that the demo started has failed, after printing its own message."""


@dataclass(frozen=True)
class DemoResult:
    """The paths of the results, and the three losses on held-out text, in nats per token."""

    folder: Path
    report: Path
    loss: float
    baselines: BaselineLosses
    training_seconds: float


def run_demo(folder: Path, show: Callable[[str], None]) -> DemoResult:
    """Runs the demo in ``folder``, which must not exist yet; ``show`` receives its output.

    Raises:
        DataError: the standard library's sources are not on this machine.
        StorageError: the disk is full or not writable.
        DemoError: training failed, after printing the reason.
    """
    train, valid = _prepare(folder / "data", show)
    num_ranks = 1 if torch.cuda.device_count() == 1 else 2
    overrides = _overrides(folder, train, valid, num_ranks, show)
    started = perf_counter()
    for layout, changes in _parts(num_ranks):
        show(f"\ntraining on {num_ranks} rank{'s' if num_ranks > 1 else ''}: {layout}")
        arguments = ["train", _RECIPE, *overrides, *changes]
        way_on = partial(where_it_goes_on, folder / "checkpoints")
        if code := launch(num_ranks, arguments, folder / "logs", show, goes_on=way_on):
            raise DemoError(f"megalith {' '.join(arguments)} ended with exit code {code}; see its message above")
    training_seconds = perf_counter() - started
    show(f"trained in {duration(training_seconds)}")
    [found] = evaluate_checkpoint(folder, None, None)
    baselines = baseline_losses(IndexedDataset(train), IndexedDataset(valid), _VOCABULARY)
    _write_findings(folder, found, baselines)
    samples = _write_samples(folder)
    report = write_report(folder)
    show(_summary(folder, report, found, baselines, samples))
    return DemoResult(folder, report, found.loss, baselines, training_seconds)


def _prepare(folder: Path, show: Callable[[str], None]) -> tuple[str, str]:
    """Prepares the training and the held-out dataset; returns their prefixes."""
    files = standard_library_sources()
    kept, held_out = split_by_file(files, _HELD_OUT, seed=0)
    size = sum(file.stat().st_size for file in files) / 1e6
    show(f"corpus: {len(files):,} files from this Python's standard library, {size:.1f} MB; {len(held_out)} held out")
    found = prepare(kept, folder / "text", vocab_size=_VOCABULARY, valid=held_out, processes=num_cores())
    assert found.valid is not None, "files were held out"
    for name, part in (("train", found.train), ("held out", found.valid)):
        show(f"{name}: {part.num_documents:,} documents, {part.num_tokens:,} tokens, vocabulary size {_VOCABULARY:,}")
    return str(found.prefix), str(found.valid_prefix)


def _overrides(folder: Path, train: str, valid: str, num_ranks: int, show: Callable[[str], None]) -> list[str]:
    """The settings that both parts share."""
    overrides = [
        f"data.train={train}",
        f"data.valid={valid}",
        f"data.seq_length={_SEQUENCE}",
        f"train.global_batch_size={_BATCH}",
        f"train.micro_batch_size={_BATCH // num_ranks}",
        f"optim.decay_steps={_STEPS}",
        "train.log_every=25",
        "train.evaluation.every=50",
        "train.evaluation.samples=64",
        f"run={folder}",
    ]
    shape = load_run(_RECIPE, overrides).model
    probe = probe_dtype(shape, _VOCABULARY, _SEQUENCE, _BATCH // num_ranks, num_threads=1)
    show(probe.line)
    return [*overrides, f"precision.dtype={probe.dtype}"]


def _parts(num_ranks: int) -> list[tuple[str, list[str]]]:
    """The layout of each part of the training, and its settings."""
    steps = [f"train.steps={_STEPS_BEFORE_CHANGE}"], [f"train.steps={_STEPS}"]
    if num_ranks == 1:
        return [("one layout, as there is one GPU", steps[0]), ("resumed from the checkpoint", steps[1])]
    return [
        ("data parallel", [*steps[0], "parallel.shard=2"]),
        ("tensor parallel, resumed from the same checkpoint", [*steps[1], "parallel.tensor=2"]),
    ]


def _write_findings(folder: Path, found: CheckpointLoss, baselines: BaselineLosses) -> None:
    evaluation = {
        "valid_loss": found.loss,
        "valid_tokens": found.num_tokens,
        "unigram_loss": baselines.unigram,
        "bigram_loss": baselines.bigram,
    }
    write_json_atomic(folder / "evaluation.json", evaluation)


def _write_samples(folder: Path) -> list[dict[str, str]]:
    sampling = Sampling(temperature=0.7, top_p=0.95)
    generator = TextGenerator.load(folder)
    texts = generator.generate(_PROMPTS, 120, sampling=sampling, seeds=range(len(_PROMPTS)))
    samples = [{"prompt": prompt, "text": text} for prompt, text in zip(_PROMPTS, texts, strict=True)]
    write_json_atomic(folder / "samples.json", samples)
    return samples


def _summary(
    folder: Path, report: Path, found: CheckpointLoss, baselines: BaselineLosses, samples: list[dict[str, str]]
) -> str:
    lines = ["", "samples"]
    for sample in samples:
        lines += ["  | " + line for line in (sample["prompt"] + sample["text"]).splitlines()[:8]] + [""]
    lines += [
        f"held-out loss, nats per token over {found.num_tokens:,} tokens",
        f"  unigram              {baselines.unigram:.3f}",
        f"  interpolated bigram  {baselines.bigram:.3f}",
        f"  this model           {found.loss:.3f}  ({baselines.bigram - found.loss:.3f} below the bigram)",
        "",
        f"all files are in {folder}: config.yaml, metrics.jsonl, checkpoints/, data/, samples.json",
        f"report: {report}  (opens in any browser, offline)",
        f'generate more text: megalith generate {folder} --prompt "def "',
    ]
    return "\n".join(lines)
