"""``megalith train``: from a recipe or YAML file and dotted overrides to a trained run folder."""

import logging
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megalith.cli.recipes import complete_recipe
from megalith.recipe_files import require_source

if TYPE_CHECKING:
    from megalith.config import RunConfig

__all__ = ["train"]


def _complete_source(incomplete: str) -> list[tuple[str, str]]:
    """Recipes, and files of settings, for a shell."""
    folder = Path(incomplete).parent
    files = sorted(str(path) for path in folder.glob("*.yaml") if str(path).startswith(incomplete))
    return [*complete_recipe(incomplete), *((file, "") for file in files)]


def _complete_override(incomplete: str) -> list[tuple[str, str]]:
    """Settings, each with what it means, for a shell."""
    from megalith.config.settings_tree import FIELDS

    return [(f"{name}=", field.description or "") for name, field in FIELDS.items() if name.startswith(incomplete)]


Source = Annotated[
    str | None,
    typer.Argument(
        help="A recipe's name or a YAML file; left out, the recipes are listed.",
        metavar="RECIPE",
        autocompletion=_complete_source,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Settings over it, such as optim.lr=3e-4 parallel.tensor=2.",
        metavar="[KEY=VALUE]...",
        autocompletion=_complete_override,
    ),
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
    source = require_source(source)  # answered before torch is loaded
    overrides = overrides or []
    from megalith.training.torchrun_environment import launched_rank, num_ranks

    launched = launched_rank()
    world_size = num_ranks(nproc, launched)

    from megalith.topology.agreement import agreed
    from megalith.training.machine_fit import check_machine
    from megalith.training.preflight import preflight
    from megalith.training.process_group import choose_device, process_group

    # one rank may see other files than the rest, so that ranks judge their input together
    with process_group(choose_device()) if launched else nullcontext():
        with agreed():
            config = preflight(source, overrides, world_size)
            if not dry_run:
                check_machine(config, world_size, nproc if launched is None else launched.local_world_size)
        if dry_run:
            from megalith.training.dry_run import describe

            print(describe(config, world_size))
            return
        if launched or nproc == 1:
            _train_here(config)
    if nproc > 1 and not launched:
        from megalith.training.launch import launch

        raise typer.Exit(launch(nproc, ["train", source, *overrides]))


def _train_here(config: "RunConfig") -> None:
    """Trains in this process, which is one rank or all of them."""
    from megalith.cli.console import Console
    from megalith.insight.report import write_report_if_possible
    from megalith.training.loop import Outcome
    from megalith.training.pretrain import pretrain

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    console = Console()
    outcome = pretrain(config, console.show, console.show_progress)
    console.close()
    if os.environ.get("RANK", "0") == "0":
        console.show(write_report_if_possible(config.run))
    if outcome is Outcome.STOPPED:
        raise typer.Exit(75)
