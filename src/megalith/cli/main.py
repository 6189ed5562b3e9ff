"""The program ``megalith``: its commands, error messages and exit codes.

Exit codes: 0 success, 2 invalid input, 75 saved on a signal or time limit (start it again), 128 + number terminated by
a signal, 1 anything else, such as an unexpected error or the death of a rank. Commands import what they need when they
run, so that ``megalith --help`` does not import torch.
"""

import os
import resource
import sys
import time
from contextlib import suppress
from io import TextIOWrapper
from typing import Annotated, NoReturn

import typer

from megalith import __version__
from megalith.cli import convert, data, demo, doctor, evaluate, generate, recipes, report, train, verify
from megalith.cli.console import say, show_text
from megalith.errors import ConfigError, MegalithError, NonFiniteError, RankFailedError
from megalith.resilience.rank_link import Failure, is_supervised, tell_failure

__all__ = ["app", "main", "run"]

_MOST_FILES = 1 << 16


def _show_version(wanted: bool) -> None:
    if wanted:
        show_text(f"megalith {__version__}")
        raise typer.Exit


app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("demo")(demo.demo)
app.add_typer(data.app, name="data")
app.add_typer(recipes.app, name="recipes")
app.command("train")(train.train)
app.command("eval")(evaluate.evaluate)
app.command("generate")(generate.generate)
app.add_typer(convert.app, name="convert")
app.command("report")(report.report)
app.command("verify")(verify.verify)
app.command("doctor")(doctor.doctor)


@app.callback()
def megalith(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train transformer models that do not fit on one device, with the same numbers in every layout."""


def main() -> NoReturn:
    """Runs the command line and exits."""
    _open_missing_streams()
    _allow_many_files()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # paths and texts may have characters that the terminal's encoding lacks, which must not raise an error
            stream.reconfigure(errors="backslashreplace")
    sys.exit(run())


def run() -> int:
    """Runs the command line, prints the error that ends it, and returns the exit code.

    An expected error (``MegalithError``) is printed as one message: by rank 0 if every rank has it, otherwise by the
    rank that has it, with its number. Any other error is printed with its traceback by every rank that has it. Ranks
    that ``launch`` has started also report their errors to it, and it prints the summary.
    """
    try:
        _require_working_folder()
        app()
    except MegalithError as error:
        code = 1 if isinstance(error, NonFiniteError | RankFailedError) else 2
        return _fail(Failure.foreseen_error(error, code))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        _let_rank_0_end_first(code)
        return code
    except Exception as error:
        return _fail(Failure.unforeseen_error(error))
    return 0


def _open_missing_streams() -> None:
    """Opens /dev/null for streams that the shell has closed (``>&-``); files opened later would get their numbers."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _allow_many_files() -> None:
    """Raises the limit on open files as far as allowed: a blend keeps two files of each dataset open."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(_MOST_FILES, most) if most != resource.RLIM_INFINITY else _MOST_FILES
    if resource.RLIM_INFINITY != allowed < wanted:
        with suppress(OSError, ValueError):  # some systems have a lower limit of their own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _require_working_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError("the working directory no longer exists; change to another one (cd)") from error


def _fail(failure: Failure) -> int:
    tell_failure(failure)
    rank = os.environ.get("RANK", "0")
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    if not failure.foreseen:
        say(("" if alone else f"rank {rank} failed:\n") + failure.text.rstrip("\n"))
    elif not failure.on_every_rank:
        say(f"error: {'' if alone else f'rank {rank}: '}{failure.text}")
    elif rank == "0":
        say(f"error: {failure.text}")
    if failure.on_every_rank:
        _let_rank_0_end_first(failure.code)
    return failure.code


def _let_rank_0_end_first(code: int) -> None:
    """Delays other ranks, because torchrun ends all ranks with the first, and rank 0 prints the message."""
    if code and os.environ.get("RANK", "0") != "0" and not is_supervised():
        time.sleep(5.0)
