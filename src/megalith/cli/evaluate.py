"""``megalith eval``: the loss of a trained run or checkpoint on a dataset, or its accuracy on questions."""

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from megalith.cli.console import Announcer, Console, Progress, show_log, show_text
from megalith.cli.paths import path_argument, path_option
from megalith.garbage_collection import importing
from megalith.wording import counted

__all__ = ["evaluate"]

log = logging.getLogger(__name__)


def evaluate(
    source: Annotated[
        str,
        path_argument(
            "A run's folder, or one of its checkpoints; with --choices also a Hugging Face or Megatron folder.",
            "MODEL",
            kind=str,
        ),
    ],
    data: Annotated[
        str | None, path_option("Prefix of the dataset; by default the run's data.valid.", kind=str)
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="Evaluate on this many samples, evenly spaced; by default on all.")
    ] = None,
    choices: Annotated[
        str | None,
        path_option(
            'Measure accuracy on questions instead of loss: {"context": ..., "choices": [...], "answer": index}, '
            "one per line.",
            "FILE.jsonl",
            kind=str,
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        path_option("With --choices: path of a tokenizer.json, for a model without one.", "PATH"),
    ] = None,
    eod: Annotated[
        str | None, typer.Option(help="Token of --tokenizer that ends a document, if it has an unusual name.")
    ] = None,
) -> None:
    """Measure held-out loss or accuracy, in one process, for a checkpoint written in any layout."""
    _check(data, samples, choices, tokenizer, eod)
    console = Console(sys.stderr)
    show_log(console)
    unit = "samples" if choices is None else "choices"
    show_progress = Progress(console, lambda done, total: f"{done:,} of {total:,} {unit}")
    with Announcer() as announcer:
        announcer.begin(f"loading {source}")

        def progress(done: int, total: int) -> None:
            if not done:
                announcer.begin(f"evaluating the first {unit}")
            else:
                announcer.end()
                show_progress(done, total)

        try:
            if choices is None:
                lines = _losses(source, data, samples, progress)
            else:
                lines = _answers(source, choices, tokenizer, eod, progress)
        finally:
            console.close()
    for line in lines:
        show_text(line)


def _check(data: str | None, samples: int | None, choices: str | None, tokenizer: Path | None, eod: str | None) -> None:
    """Raises ConfigError for options that contradict each other."""
    from megalith.errors import ConfigError

    if data == "":
        raise ConfigError("--data is empty; give the PREFIX of a dataset, or leave it out to use the run's data.valid")
    if choices is not None and (data is not None or samples is not None):
        raise ConfigError("--choices evaluates all questions in its file; leave out --data and --samples")
    if choices is None and tokenizer is not None:
        raise ConfigError("--tokenizer only applies to --choices, because a dataset is already tokenized; leave it out")
    if eod is not None and tokenizer is None:
        raise ConfigError("--eod names a token of --tokenizer, but --tokenizer is not given; leave --eod out")


def _losses(source: str, data: str | None, samples: int | None, progress: Callable[[int, int], None]) -> list[str]:
    with importing():
        from megalith.training.inference import evaluate_checkpoint

    lines: list[str] = []
    for found in evaluate_checkpoint(source, data, samples, progress=progress):
        named = f"{found.name}, " if found.name else ""
        unit = f"nats per token, perplexity {found.perplexity:.2f}," if found.counted == "tokens" else "nats"
        others = [f"; {name} {mean:.4f}" for name, mean in list(found.means.items())[1:] if "/" not in name]
        lines.append(
            f"{named}{found.dataset}: loss {found.loss:.4f} {unit} over {found.num_tokens:,} {found.counted}, at step "
            f"{found.step}{''.join(others)}"
        )
        lines += _confusion(found.means, found.classes)
    return lines


def _confusion(means: Mapping[str, float], names: Sequence[str]) -> list[str]:
    """Lines of the confusion matrix: for each class, the shares predicted as each class; empty if not measured.

    A class without held-out samples has dashes. Columns are headed by class numbers, to keep them narrow, and rows by
    numbers and ``names``.
    """
    shares = {tuple(name.split("/")[1:]): mean for name, mean in means.items() if name.startswith("confusion/")}
    classes = sorted({label for pair in shares for label in pair}, key=int)
    shown = {label: label for label in classes} | {str(number): f"{number} {name}" for number, name in enumerate(names)}
    width = 1 + max(map(len, ["class  ", *shown.values()]))
    head = f"{'class':<{width}}{''.join(f'{label:>6}' for label in classes)}   predicted as"
    cells = {pair: f"{shares[pair]:>6.0%}" if pair in shares else f"{'-':>6}" for pair in product(classes, repeat=2)}
    rows = (f"{shown[label]:<{width}}{''.join(cells[label, taken] for taken in classes)}" for label in classes)
    return [head, *rows] if classes else []


def _answers(
    source: str, choices: str, tokenizer: Path | None, eod: str | None, progress: Callable[[int, int], None]
) -> list[str]:
    with importing():
        from megalith.data.choices import read_questions
        from megalith.training.inference import say_what_experts_drop
        from megalith.training.tasks.multiple_choice import answer_questions
        from megalith.training.tasks.text_scores import TextScorer

    questions = read_questions(choices)  # before the model, which is slow to load
    scorer = TextScorer.load(source, tokenizer, eod)
    say_what_experts_drop(scorer.model.config, "the choices that are scored in one batch")
    found = answer_questions(scorer, questions, progress)
    if found.num_cut:
        log.warning(
            "truncated %s of %s at the beginning, to fit the model's context of %s tokens",
            f"{found.num_cut:,}",
            counted(found.num_questions, "question"),
            f"{scorer.longest:,}",
        )
    return [
        f"{choices}: accuracy {found.accuracy:.2%}, {found.per_byte:.2%} by likelihood per byte, "
        f"{found.per_token:.2%} per token, of {counted(found.num_questions, 'question')} (guessing {found.chance:.2%})"
    ]
