"""The program ``megalith``: its commands, and what an error becomes.

Exit codes: 0 done, 2 bad input, 75 saved on a signal or time limit (start it again), 1 anything else. Commands import
what they need when they run, so that ``megalith --help`` does not wait for torch.
"""

import os
import sys
import time
from typing import NoReturn

import typer

from megalith.cli import data, demo, evaluate, generate, train
from megalith.errors import MegalithError, NonFiniteError

__all__ = ["app", "main", "run"]

app = typer.Typer(
    help="Train transformer models that do not fit one device: the same numbers in every layout.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("demo")(demo.demo)
app.add_typer(data.app, name="data")
app.command("train")(train.train)
app.command("eval")(evaluate.evaluate)
app.command("generate")(generate.generate)


def main() -> NoReturn:
    """Runs the command line and exits."""
    code = run()
    rank = os.environ.get("RANK")
    if rank is not None:
        from megalith.training.launch import leave_exit_code  # torch.distributed is loaded in a rank anyway

        leave_exit_code(code)
        if code and rank != "0":
            time.sleep(5.0)  # torchrun ends all ranks with the first: let that be rank 0, which has the message
    sys.exit(code)


def run() -> int:
    """Runs the command line and returns the exit code; errors on purpose become one message."""
    try:
        app()
    except MegalithError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 1 if isinstance(error, NonFiniteError) else 2
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
