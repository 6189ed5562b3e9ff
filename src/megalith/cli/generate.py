"""``megalith generate``: text from a trained run."""

from typing import Annotated

import typer

__all__ = ["generate"]


def generate(
    source: Annotated[str, typer.Argument(help="A run's folder, or one of its checkpoints.", metavar="RUN")],
    prompt: Annotated[str, typer.Option(help="The text to go on from.")],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to add, at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0: the likeliest token; 1: the model's own odds.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Draw among the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw among the likeliest tokens that add up to p.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed draws the same text.")] = 0,
) -> None:
    """Sample text, in one process, whatever layout wrote the checkpoint."""
    from megalith.models.generation import Sampling
    from megalith.training.tasks.generation import generate_text

    sampling = Sampling(temperature, top_k, top_p)
    print(prompt + generate_text(source, prompt, max_new_tokens, sampling=sampling, seed=seed))
