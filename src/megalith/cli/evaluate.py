"""``megalith eval``: the loss of a trained run, or of one checkpoint, on a dataset."""

from typing import Annotated

import typer

__all__ = ["evaluate"]


def evaluate(
    source: Annotated[str, typer.Argument(help="A run's folder, or one of its checkpoints.", metavar="RUN")],
    data: Annotated[str | None, typer.Option(help="Prefix of the dataset; by default the run's data.valid.")] = None,
    samples: Annotated[
        int | None, typer.Option(help="Evaluate on so many samples, evenly spread; by default on all.")
    ] = None,
) -> None:
    """Measure held-out loss, in one process, whatever layout wrote the checkpoint."""
    from megalith.training.inference import evaluate_checkpoint

    evaluation = evaluate_checkpoint(source, data, samples)
    print(
        f"{evaluation.dataset}: loss {evaluation.loss:.4f} nats per token, perplexity {evaluation.perplexity:.2f}, "
        f"over {evaluation.num_tokens:,} tokens, at step {evaluation.step}"
    )
