"""Arguments and options that are paths: ``~`` is expanded where quotes or ``--out=~/x`` keep the shell from it.

Not expanded: what begins with ``./~``, and a name that exists as given, such as one that the shell found for ``*``.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from megalith.errors import ConfigError
from megalith.input_file import home_expanded

__all__ = ["path_argument", "path_option"]

Kind = type[Path] | type[str]


def path_argument(
    help: str, metavar: str, complete: Callable[[str], list[tuple[str, str]]] | None = None, *, kind: Kind = Path
) -> Any:
    """Returns an argument that is a path; ``complete`` completes it in the shell.

    ``kind`` must be the type of its parameter, of which there may be a list: str if it may also be a URL or a name.
    """
    read = _PARSERS[kind]
    return typer.Argument(help=help, metavar=metavar, autocompletion=complete, parser=read, callback=_refuse_unknown)


def path_option(help: str, metavar: str = "PATH", *names: str, kind: Kind = Path) -> Any:
    """Returns an option that is a path, with other ``names`` than that of its parameter, if given."""
    return typer.Option(*names, help=help, metavar=metavar, parser=_PARSERS[kind], callback=_refuse_unknown)


def _as_text(given: str | Path) -> str:
    """Returns ``given`` expanded. It begins with ``~`` only if there is no such user: see ``_refuse_unknown``."""
    given = str(given)  # typer also passes defaults
    if given.startswith("~") and not os.path.lexists(given):
        try:
            return home_expanded(given)
        except ValueError:  # typer would show it as a wrong usage
            return given
    # absolute, because a Path drops the ./ that keeps others from expanding it again
    return os.path.abspath(given) if str(Path(given)).startswith("~") else given


def _as_path(given: str | Path) -> Path:
    return Path(_as_text(given))


_PARSERS: dict[Kind, Callable[[str], Any]] = {Path: _as_path, str: _as_text}


def _refuse_unknown(given: Any) -> Any:
    """Returns ``given``. Raises ConfigError if it is in the home folder of nobody."""
    for each in given if isinstance(given, list | tuple) else [given]:
        if str(each).startswith("~"):
            try:
                home_expanded(str(each))
            except ValueError as error:
                raise ConfigError(f"{each}: the path {error}") from error
    return given
