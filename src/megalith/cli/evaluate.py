"""``megalith eval``: the loss of a trained run, or of one checkpoint, on a dataset."""

import logging
import sys
from typing import Annotated

import typer

from megalith.cli.console import Announcer, Console, ConsoleHandler, Progress, show_text

__all__ = ["evaluate"]


def evaluate(
    source: Annotated[str, typer.Argument(help="A run's folder, or one of its checkpoints.", metavar="RUN")],
    data: Annotated[str | None, typer.Option(help="Prefix of the dataset; by default the run's data.valid.")] = None,
    samples: Annotated[
        int | None, typer.Option(help="Evaluate on so many samples, evenly spread; by default on all.")
    ] = None,
) -> None:
    """Measure held-out loss, in one process, whatever layout wrote the checkpoint."""
    from megalith.errors import ConfigError

    if data == "":
        raise ConfigError("--data is empty; name a dataset's PREFIX, or leave it out for the run's data.valid")
    console = Console(sys.stderr)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[ConsoleHandler(console)])
    show_progress = Progress(console, lambda done, total: f"{done:,} of {total:,} samples")
    with Announcer() as announcer:
        announcer.begin(f"loading {source}")
        from megalith.training.inference import evaluate_checkpoint

        def progress(done: int, total: int) -> None:
            if not done:
                announcer.begin("evaluating the first samples; operations may be compiled for them")
            else:
                announcer.end()
                show_progress(done, total)

        try:
            evaluations = evaluate_checkpoint(source, data, samples, progress=progress)
        finally:
            console.close()
    for evaluation in evaluations:
        name = f"{evaluation.name}, " if evaluation.name else ""
        show_text(
            f"{name}{evaluation.dataset}: loss {evaluation.loss:.4f} nats per token, perplexity "
            f"{evaluation.perplexity:.2f}, over {evaluation.num_tokens:,} tokens, at step {evaluation.step}"
        )
