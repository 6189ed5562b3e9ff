"""``megalith report``: writes the report of a run."""

from pathlib import Path
from typing import Annotated

import typer

from megalith.cli.console import show_text

__all__ = ["report"]


def report(
    run: Annotated[Path, typer.Argument(help="A run's folder, finished or still training.", metavar="RUN")],
    out: Annotated[Path | None, typer.Option(help="The file to write; by default RUN/report.html.")] = None,
) -> None:
    """Write report.html from what a run has recorded so far."""
    from megalith.errors import ConfigError
    from megalith.insight.report import write_report

    if out is not None and not out.name:
        raise ConfigError(f"--out ({out}) must be the path of a file, such as {out / 'report.html'}")
    show_text(str(write_report(run, out)))
