"""``megalith generate``: samples text from a trained run, or from a Hugging Face or Megatron folder."""

import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from megalith.cli.console import Announcer, say, show_text
from megalith.cli.paths import path_argument, path_option
from megalith.garbage_collection import importing

if TYPE_CHECKING:
    from megalith.models.sampling import Sampling
    from megalith.training.tasks.generation import TextSource

__all__ = ["generate"]


def generate(
    source: Annotated[
        str,
        path_argument(
            "A run's folder, one of its checkpoints, or a Hugging Face or Megatron folder.", "MODEL", kind=str
        ),
    ],
    prompt: Annotated[str | None, typer.Option(help="The text to continue; a T5 answers it.")] = None,
    prompt_file: Annotated[
        str | None, path_option("File whose whole text is the prompt; - for standard input.", "PATH", kind=str)
    ] = None,
    prompts_file: Annotated[
        str | None,
        path_option("File with one prompt per line, generated as one batch; - for standard input.", "PATH", kind=str),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum number of tokens to generate.")] = 128,
    samples: Annotated[int, typer.Option(help="Samples per prompt, in one batch, each with the next seed.")] = 1,
    temperature: Annotated[float, typer.Option(help="0: greedy; 1: the model's own probabilities.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most likely tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the most likely tokens whose probabilities add up to p.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Sample from tokens at least p times as likely as the most likely one.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: makes tokens that are already in the text less likely.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this string; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(help="Random seed; the same seed gives the same text.")] = 0,
    special_tokens: Annotated[
        bool,
        typer.Option("--special-tokens", help="Parse special tokens in the prompt, as chat templates need."),
    ] = False,
    tokenizer: Annotated[Path | None, path_option("Path of a tokenizer.json, for a model without one.", "PATH")] = None,
    eod: Annotated[
        str | None, typer.Option(help="Token of --tokenizer that ends a document, if it has an unusual name.")
    ] = None,
) -> None:
    """Generate text, in one process, from a checkpoint written in any layout. Text is printed as it is sampled."""
    _check_eod(eod, tokenizer)
    with Announcer() as announcer:
        announcer.begin(f"loading {source}")
        with importing():
            from megalith.models.sampling import Sampling
            from megalith.training.tasks.generation import TextSource

        # check everything that does not need the model, which is slow to load
        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
        _check(max_new_tokens, stop or [], samples, seed)
        prompts = _prompts(prompt, prompt_file, prompts_file, announcer, then=f"loading {source}")
        (opened := TextSource.open(source, tokenizer, eod)).encode(prompts, special_tokens=special_tokens)
        rows = [_Row(text, n, m, seed + m) for n, text in enumerate(prompts) for m in range(samples)]
        how = _Drawing(max_new_tokens, sampling, tuple(stop or ()), special_tokens)
        for text in _texts(opened, rows, how, announcer):
            _show(text)


class _Row(NamedTuple):
    """A text to sample: ``number`` is the index of its prompt, ``sample`` its index among the prompt's samples."""

    prompt: str
    number: int
    sample: int
    seed: int


class _Drawing(NamedTuple):
    """Sampling options shared by all texts: keyword arguments of ``TextGenerator.stream``."""

    max_new_tokens: int
    sampling: "Sampling"
    stop: tuple[str, ...]
    special_tokens: bool


def _texts(source: "TextSource", rows: Sequence[_Row], drawing: _Drawing, announcer: Announcer) -> Iterator[str]:
    """Yields the output as soon as it is sampled."""
    from megalith.training.tasks.generation import TextGenerator, in_order

    generator = TextGenerator(source.load_model(), source)
    prompts, seeds = [row.prompt for row in rows], [row.seed for row in rows]
    pieces = generator.stream(prompts, seeds=seeds, **drawing._asdict())
    announcer.begin("computing the first token; operations may be compiled for it")
    first = next(pieces)
    announcer.end()
    last = rows[-1]
    behind = "\n" if source.answers else ""  # an answer begins on a new line
    openings = [_heading(row, last.number + 1, last.sample + 1) + row.prompt + behind for row in rows]
    return in_order(openings, itertools.chain([first], pieces))


def _heading(row: _Row, num_prompts: int, num_samples: int) -> str:
    """The heading of a text; empty if there is only one."""
    places = [f"prompt {row.number + 1} of {num_prompts}"] if num_prompts > 1 else []
    places += [f"sample {row.sample + 1} of {num_samples}"] if num_samples > 1 else []
    return f"=== {', '.join(places)}, seed {row.seed}\n" if places else ""


def _check_eod(eod: str | None, tokenizer: Path | None) -> None:
    from megalith.errors import ConfigError

    if eod is not None and tokenizer is None:
        raise ConfigError("--eod names a token of --tokenizer, but --tokenizer is not given; leave --eod out")


def _check(max_new_tokens: int, stop: Sequence[str], samples: int, seed: int) -> None:
    from megalith.data.stop_strings import check_stop_strings
    from megalith.errors import ConfigError
    from megalith.models.generation import check_length
    from megalith.models.sampling import check_seed

    if samples < 1:
        raise ConfigError(f"--samples must be 1 or more; got {samples}")
    check_length(max_new_tokens)
    check_stop_strings(stop)
    for drawn in (seed, seed + samples - 1):
        check_seed(drawn)


def _prompts(
    prompt: str | None, prompt_file: str | None, prompts_file: str | None, announcer: Announcer, then: str
) -> list[str]:
    """The prompts given by one of the options; reading them may block on a FIFO or a terminal."""
    from megalith.errors import ConfigError
    from megalith.training.tasks.generation import read_prompt, read_prompts

    if [prompt, prompt_file, prompts_file].count(None) != 2:
        raise ConfigError(
            "give one of --prompt TEXT, --prompt-file PATH and --prompts-file PATH (- for standard input)"
        )
    if prompt is not None:
        return [prompt]
    path = prompts_file or prompt_file or ""
    if path == "-" and sys.stdin.isatty():
        announcer.end()
        say("type the prompt, and end it with Ctrl-D on a line of its own")
    else:
        announcer.begin(f"reading the prompt from {'standard input' if path == '-' else path}")
    read = [read_prompt(path, sys.stdin.buffer)] if prompts_file is None else read_prompts(path, sys.stdin.buffer)
    announcer.begin(then)
    return read


def _show(text: str) -> None:
    show_text(text, end="")
