"""The program ``megalith``: its commands, and what an error becomes.

Exit codes: 0 done, 2 bad input, 75 saved on a signal or time limit (start it again), 1 anything else, such as an error
that was not foreseen. Commands import
what they need when they run, so that ``megalith --help`` does not wait for torch.
"""

import os
import sys
import time
import traceback
from typing import NoReturn

import typer

from megalith.cli import data, demo, evaluate, generate, report, train
from megalith.errors import MegalithError, NonFiniteError, RankFailedError

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
app.command("report")(report.report)


def main() -> NoReturn:
    """Runs the command line and exits."""
    sys.exit(run())


def run() -> int:
    """Runs the command line, prints the error that ends it, and returns the exit code.

    A foreseen error is one message: of rank 0 if every rank has it, else of the rank that has it, by its number. Any
    other error is printed with its traceback by every rank that has it.
    """
    try:
        app()
    except MegalithError as error:
        _print(error)
        code = 1 if isinstance(error, NonFiniteError | RankFailedError) else 2
        return _leave(code, for_all_ranks=error.on_every_rank)
    except SystemExit as end:
        return _leave(end.code if isinstance(end.code, int) else int(end.code is not None), for_all_ranks=True)
    except Exception:
        where = f"rank {os.environ['RANK']} failed:\n" if _in_several_ranks() else ""
        print(where + traceback.format_exc(), end="", file=sys.stderr, flush=True)  # at once: ranks share the screen
        # no code is left: where a connection broke, the rank that broke it has the better one
        return 1
    return _leave(0, for_all_ranks=True)


def _print(error: MegalithError) -> None:
    if error.on_every_rank and os.environ.get("RANK", "0") != "0":
        return
    where = f"rank {os.environ['RANK']}: " if _in_several_ranks() and not error.on_every_rank else ""
    print(f"error: {where}{error}", file=sys.stderr, flush=True)


def _in_several_ranks() -> bool:
    return "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


def _leave(code: int, *, for_all_ranks: bool) -> int:
    """``code``, which is left for the launcher too, if there is one."""
    rank = os.environ.get("RANK")
    if rank is not None:
        from megalith.training.launch import leave_exit_code  # torch.distributed is loaded in a rank anyway

        leave_exit_code(code)
        if code and for_all_ranks and rank != "0":
            time.sleep(5.0)  # torchrun ends all ranks with the first: let that be rank 0, which has the message
    return code
