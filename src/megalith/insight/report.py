"""``RUN/report.html``: the report of a run, as one page that needs no network, no script and no other file."""

import logging
from html import escape
from importlib import resources
from pathlib import Path

from megalith.errors import MegalithError
from megalith.insight.report_sections import origin, sections, summary, tiles, title
from megalith.insight.run_history import RunHistory, read_run
from megalith.observe.metrics import read_metrics
from megalith.storage.atomic import write_text_atomic

__all__ = ["write_report", "write_report_if_possible"]

log = logging.getLogger(__name__)


def write_report(run_folder: Path, page: Path | None = None) -> Path:
    """Writes ``page``, by default ``report.html`` in ``run_folder``, from the files in that folder; returns its path.

    Only metrics.jsonl is required; parts without a file are omitted. The run may still be training.

    Raises:
        DataError: there is no record of a training step, or a file is damaged.
        MissingDependencyError: matplotlib is not installed.
        StorageError: the page cannot be written there.
    """
    page = run_folder / "report.html" if page is None else page
    text = _page(read_run(run_folder))
    write_text_atomic(page, text.encode(errors="replace").decode())  # JSON may contain half of a surrogate pair
    return page


def write_report_if_possible(run_folder: Path | str) -> str | None:
    """Writes the report; returns a line with its path or with the error, so that a finished run does not fail here.

    Returns None if no step has been recorded.
    """
    try:
        if not any("loss" in record for record in read_metrics(Path(run_folder))):
            return None
        return f"report: {write_report(Path(run_folder))}"
    except MegalithError as error:
        return f"no report: {error}"
    except Exception as error:  # such as an error in matplotlib
        log.warning("could not draw report.html", exc_info=True)
        return f"no report: {type(error).__name__}: {error}; the run is complete, try: megalith report {run_folder}"


def _page(run: RunHistory) -> str:
    style = resources.files("megalith.insight").joinpath("report.css").read_text(encoding="utf-8")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title(run)} · Megalith</title>
<style>
{style}</style>
</head>
<body>
<main>
<header>
<p class="brand">Megalith</p>
<h1>{escape(run.name)}</h1>
{origin(run)}
<p class="summary">{summary(run)}</p>
</header>
<dl class="tiles">{tiles(run)}</dl>
{sections(run)}
</main>
</body>
</html>
"""
