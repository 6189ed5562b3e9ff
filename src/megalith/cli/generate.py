"""``megalith generate``: text from a trained run."""

import itertools
import sys
from pathlib import Path
from typing import Annotated

import typer

from megalith.cli.console import Announcer, say, show_text

__all__ = ["generate"]


def generate(
    source: Annotated[str, typer.Argument(help="A run's folder, or one of its checkpoints.", metavar="RUN")],
    prompt: Annotated[str | None, typer.Option(help="The text to go on from.")] = None,
    prompt_file: Annotated[
        str | None, typer.Option(help="A file with that text, as it stands; - for standard input.", metavar="PATH")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to add, at most.")] = 128,
    samples: Annotated[int, typer.Option(help="Texts to draw, each with the next seed.")] = 1,
    temperature: Annotated[float, typer.Option(help="0: the likeliest token; 1: the model's own odds.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Draw among the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw among the likeliest tokens that add up to p.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed draws the same text.")] = 0,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Its tokenizer.json, for a run that keeps none.", metavar="PATH")
    ] = None,
    eod: Annotated[
        str | None, typer.Option(help="Token of --tokenizer that ends a document, if it has none of the usual names.")
    ] = None,
) -> None:
    """Sample text, in one process, whatever layout wrote the checkpoint. It is shown as it is drawn."""
    from megalith.errors import ConfigError

    if eod is not None and tokenizer is None:
        raise ConfigError("--eod names a token of --tokenizer, which is not given; leave it out")
    if samples < 1:
        raise ConfigError(f"--samples must be 1 or more; got {samples}")
    if (prompt is None) == (prompt_file is None):
        raise ConfigError("give either --prompt TEXT or --prompt-file PATH (- for standard input)")
    with Announcer() as announcer:
        announcer.begin(f"loading {source}")
        from megalith.models.generation import Sampling, check_length, check_seed
        from megalith.training.tasks.generation import TextGenerator, check_prompt

        # all that can be told without the model, which takes long to load
        sampling = Sampling(temperature, top_k, top_p)
        check_length(max_new_tokens)
        for drawn in (seed, seed + samples - 1):
            check_seed(drawn)
        if prompt_file is not None:
            prompt = _read(prompt_file, announcer)
            announcer.begin(f"loading {source}")
        assert prompt is not None, "one of the two is given"
        check_prompt(prompt)
        generator = TextGenerator.load(source, tokenizer, eod)
        for number in range(samples):
            pieces = generator.stream(prompt, max_new_tokens, sampling=sampling, seed=seed + number)
            announcer.begin("computing the first token; operations may be compiled for it")
            first = next(pieces, "")
            announcer.end()
            if samples > 1:
                _show(f"=== sample {number + 1} of {samples}, seed {seed + number}\n")
            for piece in itertools.chain([prompt, first], pieces, ["\n"]):
                _show(piece)


def _read(path: str, announcer: Announcer) -> str:
    """The prompt in the file ``path``, for which this may wait: in a FIFO, or at a terminal."""
    from megalith.training.tasks.generation import read_prompt

    if path == "-" and sys.stdin.isatty():
        announcer.end()
        say("type the prompt; it ends with Ctrl-D on a line of its own")
    else:
        announcer.begin(f"reading the prompt from {'standard input' if path == '-' else path}")
    return read_prompt(path, sys.stdin.buffer)


def _show(text: str) -> None:
    show_text(text, end="")
