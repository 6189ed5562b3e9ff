"""``megalith report``: writes the report of a run."""

from pathlib import Path
from typing import Annotated

from megalith.cli.console import show_text
from megalith.cli.paths import path_argument, path_option

__all__ = ["report"]


def report(
    run: Annotated[Path, path_argument("A run's folder, finished or still training.", "RUN")],
    out: Annotated[Path | None, path_option("The file to write; by default RUN/report.html.")] = None,
) -> None:
    """Write report.html from what a run has recorded so far."""
    from megalith.errors import ConfigError
    from megalith.insight.report import write_report

    if out is not None and not out.name:
        raise ConfigError(f"--out ({out}) must be the path of a file, such as {out / 'report.html'}")
    show_text(str(write_report(run, out)))
