"""``megalith doctor``: says what this machine can train with, and what is missing."""

import sys
from importlib import import_module
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
        try:
            import_module("torch")
        except (ImportError, OSError) as error:  # OSError: a library of CUDA is missing
            console.close()
            _show("failed", "torch", f"cannot be imported: {type(error).__name__}: {error}")
            raise typer.Exit(1) from error
        from megalith.fusions import explain
        from megalith.insight.doctor import examine

    failed = []
    try:
        for finding in examine(nproc, folder, console.show_progress):
            console.close()
            _show(finding.state, finding.name, finding.text)
            failed += [finding.name] * (finding.state == "failed")
    finally:
        console.close()
    if operations and not any(name.startswith("gpu") for name in failed):  # the table asks what the GPU can do
        show_text(f"\n{explain()}")
    if failed:
        raise typer.Exit(1)


def _show(state: str, name: str, text: str) -> None:
    first, *rest = text.split("\n")
    show_text("\n".join([f"{state:<8}{name:<15}{first}", *(f"{'':23}{line}" for line in rest)]))
