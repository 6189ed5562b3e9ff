"""``megalith verify``: proves on this machine that a recipe computes the same numbers as one process."""

import sys
from typing import Annotated

import typer

from megalith.cli.console import Console, show_log, show_text
from megalith.cli.train import Overrides, Source
from megalith.garbage_collection import importing
from megalith.recipe_files import require_source

__all__ = ["verify"]


def verify(
    source: Source = None,
    overrides: Overrides = None,
    world: Annotated[int | None, typer.Option(help="Number of ranks; by default as few as the layout needs.")] = None,
) -> None:
    """Prove that a recipe computes the same in its layout as in one process. Takes minutes; needs no data.

    The recipe is made small and run on local CPU ranks in enough layouts to cover every pair of its axes. Exit code 1
    means that some numbers differ; the first module that differs is named.
    """
    source = require_source(source)  # before torch is imported
    from megalith.errors import ConfigError

    if world is not None and world < 1:
        raise ConfigError(f"--world (the number of ranks) must be at least 1; got {world}")
    with importing():
        from megalith.insight.verify.table import as_text
        from megalith.insight.verify.verification import verify as verify_recipe

    console = Console(sys.stderr)
    show_log(console)
    try:
        found = verify_recipe(source, overrides or [], world, console.show_progress)
    finally:
        console.close()
    show_text(as_text(found))
    if found.fault is not None:
        raise typer.Exit(1)
