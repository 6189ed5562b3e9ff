"""Arguments and options that are paths: ``~`` is expanded where quotes or ``--out=~/x`` keep the shell from it."""

from collections.abc import Callable
from typing import Any

import typer

from megalith.errors import ConfigError
from megalith.input_file import home_expanded

__all__ = ["path_argument", "path_option", "with_home"]


def path_argument(help: str, metavar: str, complete: Callable[[str], list[tuple[str, str]]] | None = None) -> Any:
    """Returns an argument that is a path; ``complete`` completes it in the shell."""
    return typer.Argument(help=help, metavar=metavar, autocompletion=complete, callback=with_home)


def path_option(help: str, metavar: str | None = None, *names: str) -> Any:
    """Returns an option that is a path, with other ``names`` than that of its parameter, if given."""
    return typer.Option(*names, help=help, metavar=metavar, callback=with_home)


def with_home(given: Any) -> Any:
    """Returns ``given`` (a path, a URL, a list of them, or None) with ``~`` expanded. Raises ConfigError."""
    if given is None:
        return None
    if isinstance(given, list | tuple):
        return [with_home(each) for each in given]
    try:
        return type(given)(home_expanded(str(given)))
    except ValueError as error:
        raise ConfigError(f"{given}: the path {error}") from error
