"""``megalith train``: from a recipe or YAML file and dotted overrides to a trained run folder."""

import logging
import os
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from megalith.config import RunConfig

__all__ = ["train"]

Source = Annotated[
    str | None,
    typer.Argument(help="A recipe's name or a YAML file; left out, the recipes are listed.", metavar="RECIPE"),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings over it, such as optim.lr=3e-4 parallel.tensor=2.", metavar="[KEY=VALUE]..."),
]


def train(
    source: Source = None,
    overrides: Overrides = None,
    nproc: Annotated[int, typer.Option(help="Ranks to start on this machine; torchrun starts them on several.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be run, and end.")] = False,
) -> None:
    """Pretrain a model, or go on with a run.

    The same command continues a run that was stopped: exit code 75 says that it was, and that its state is saved.
    """
    from megalith.topology.agreement import agreed
    from megalith.training.preflight import preflight, resolve_source
    from megalith.training.process_group import choose_device, process_group

    launched = "RANK" in os.environ
    world_size = int(os.environ["WORLD_SIZE"]) if launched else nproc
    # one rank may see other files than the rest, so that ranks judge their input together
    with process_group(choose_device()) if launched else nullcontext():
        with agreed():
            source, overrides = resolve_source(source, overrides or [])
            config = preflight(source, overrides, world_size)
        if dry_run:
            from megalith.training.dry_run import describe

            print(describe(config, world_size))
            return
        if launched or nproc == 1:
            _train_here(config, _origin(source, overrides, world_size))
    if nproc > 1 and not launched:
        from megalith.training.launch import launch

        raise typer.Exit(launch(nproc, ["train", source, *overrides]))


def _origin(source: str, overrides: list[str], world_size: int) -> dict[str, str]:
    """What the run's folder says of where it comes from: ``--nproc`` stands for torchrun too."""
    ranks = ["--nproc", str(world_size)] if world_size > 1 else []
    return {"recipe": Path(source).stem, "command": shlex.join(["megalith", "train", source, *overrides, *ranks])}


def _train_here(config: "RunConfig", origin: dict[str, str]) -> None:
    """Trains in this process, which is one rank or all of them."""
    from megalith.cli.console import Console
    from megalith.insight.report import write_report_if_possible
    from megalith.training.loop import Outcome
    from megalith.training.pretrain import pretrain

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    console = Console()
    outcome = pretrain(config, console.show, console.show_progress, origin=origin)
    console.close()
    if os.environ.get("RANK", "0") == "0":
        console.show(write_report_if_possible(config.run))
    if outcome is Outcome.STOPPED:
        raise typer.Exit(75)
