"""``megalith demo``: trains a small model on text that every machine has."""

from pathlib import Path
from typing import Annotated

from megalith.cli.paths import path_option

__all__ = ["demo"]


def demo(
    out: Annotated[Path | None, path_option("The folder to create for all files; by default runs/demo.")] = None,
) -> None:
    """Train a small model on real text, change its layout midway, and show the results. Takes minutes."""
    from megalith.cli.console import Console
    from megalith.errors import ConfigError
    from megalith.insight.demo import run_demo
    from megalith.storage import explained

    if out is not None:
        with explained("write", out):
            exists = out.exists()
        if exists:
            raise ConfigError(f"{out} already exists, and the demo would mix its files with yours; choose a new folder")
    run_demo(out or _free_folder(Path("runs/demo")), Console().show)


def _free_folder(wanted: Path) -> Path:
    """``wanted``, with the first free number appended if it exists."""
    number, folder = 1, wanted
    while folder.exists():
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    return folder
