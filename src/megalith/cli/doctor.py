"""``megalith doctor``: says what this machine can train with, and what is missing."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from megalith.cli.console import Console, show_log, show_text
from megalith.cli.paths import path_option
from megalith.garbage_collection import importing

__all__ = ["doctor"]


def doctor(
    nproc: Annotated[
        int | None, typer.Option(help="Number of ranks to start; by default one for each GPU, without GPUs two.")
    ] = None,
    folder: Annotated[Path, path_option("Where runs will be written.", "FOLDER")] = Path("."),
    operations: Annotated[
        bool, typer.Option("--operations", help="Also list the path of each fused operation.")
    ] = False,
) -> None:
    """Check versions, devices, compiled operations, ranks and disk. Takes less than a minute; needs no data.

    Exit code 1 means that a check failed.
    """
    from megalith.errors import ConfigError

    if nproc is not None and nproc < 1:
        raise ConfigError(f"--nproc (the number of ranks) must be at least 1; got {nproc}")
    console = Console(sys.stderr)
    show_log(console)
    console.show_progress("loading torch")
    with importing():
        from megalith.fusions import explain
        from megalith.insight.doctor import examine

    failed = False
    try:
        for finding in examine(nproc, folder, console.show_progress):
            console.close()
            first, *rest = finding.text.split("\n")
            show_text("\n".join([f"{finding.state:<8}{finding.name:<15}{first}", *(f"{'':23}{line}" for line in rest)]))
            failed |= finding.state == "failed"
    finally:
        console.close()
    if operations:
        show_text(f"\n{explain()}")
    if failed:
        raise typer.Exit(1)
