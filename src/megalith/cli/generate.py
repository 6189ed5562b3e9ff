"""``megalith generate``: text from a trained run, or from a Hugging Face folder."""

import itertools
import sys
from pathlib import Path
from typing import Annotated

import typer

from megalith.cli.console import Announcer, say, show_text

__all__ = ["generate"]


def generate(
    source: Annotated[
        str, typer.Argument(help="A run's folder, one of its checkpoints, or a Hugging Face folder.", metavar="MODEL")
    ],
    prompt: Annotated[str | None, typer.Option(help="The text to go on from.")] = None,
    prompt_file: Annotated[
        str | None, typer.Option(help="A file with that text, as it stands; - for standard input.", metavar="PATH")
    ] = None,
    prompts_file: Annotated[
        str | None,
        typer.Option(
            help="A file with a prompt in each line, drawn as one batch; - for standard input.", metavar="PATH"
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to add, at most.")] = 128,
    samples: Annotated[int, typer.Option(help="Texts to draw from a prompt, each with the next seed, in a batch.")] = 1,
    temperature: Annotated[float, typer.Option(help="0: the likeliest token; 1: the model's own odds.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Draw among the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw among the likeliest tokens that add up to p.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Draw among tokens at least p times as likely as the likeliest.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: makes tokens that the text has less likely.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End a text before this string; may be given several times.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed draws the same text.")] = 0,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Its tokenizer.json, for a model that has none.", metavar="PATH")
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
    if [prompt, prompt_file, prompts_file].count(None) != 2:
        raise ConfigError(
            "give one of --prompt TEXT, --prompt-file PATH and --prompts-file PATH (- for standard input)"
        )
    with Announcer() as announcer:
        announcer.begin(f"loading {source}")
        from megalith.data.stop_strings import check_stop_strings
        from megalith.models.generation import check_length
        from megalith.models.sampling import Sampling, check_seed
        from megalith.training.tasks.generation import TextGenerator, TextSource, in_order

        # all that can be told without the model, which takes long to load
        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
        check_length(max_new_tokens)
        check_stop_strings(stop or [])
        for drawn in (seed, seed + samples - 1):
            check_seed(drawn)
        if prompt is None:
            prompts = _read(prompt_file, prompts_file, announcer)
            announcer.begin(f"loading {source}")
        else:
            prompts = [prompt]
        opened = TextSource.open(source, tokenizer, eod)
        opened.encode(prompts)
        generator = TextGenerator(opened.load_model(), opened)
        rows = [(number, sample) for number in range(len(prompts)) for sample in range(samples)]
        texts, seeds = [prompts[number] for number, _ in rows], [seed + sample for _, sample in rows]
        pieces = generator.stream(texts, max_new_tokens, sampling=sampling, seeds=seeds, stop=stop or [])
        announcer.begin("computing the first token; operations may be compiled for it")
        first = next(pieces)
        announcer.end()
        headings = [_heading(number, len(prompts), sample, samples, seed) for number, sample in rows]
        openings = [heading + text for heading, text in zip(headings, texts, strict=True)]
        for text in in_order(openings, itertools.chain([first], pieces)):
            _show(text)


def _heading(number: int, num_prompts: int, sample: int, num_samples: int, seed: int) -> str:
    """What stands over the text of one row; nothing over the only one."""
    places = [f"prompt {number + 1} of {num_prompts}"] if num_prompts > 1 else []
    places += [f"sample {sample + 1} of {num_samples}"] if num_samples > 1 else []
    return f"=== {', '.join(places)}, seed {seed + sample}\n" if places else ""


def _read(prompt_file: str | None, prompts_file: str | None, announcer: Announcer) -> list[str]:
    """The prompts in the one file that is given, for which this may wait: in a FIFO, or at a terminal."""
    from megalith.training.tasks.generation import read_prompt, read_prompts

    path = prompt_file if prompts_file is None else prompts_file
    assert path is not None, "one of the two is given"
    if path == "-" and sys.stdin.isatty():
        announcer.end()
        say("type the prompt; it ends with Ctrl-D on a line of its own")
    else:
        announcer.begin(f"reading the prompt from {'standard input' if path == '-' else path}")
    if prompts_file is not None:
        return read_prompts(path, sys.stdin.buffer)
    return [read_prompt(path, sys.stdin.buffer)]


def _show(text: str) -> None:
    show_text(text, end="")
