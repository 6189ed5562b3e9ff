"""``megalith recipes``: lists, shows and copies the recipes that come with the package."""

from pathlib import Path
from typing import Annotated

import typer

from megalith.cli.console import show_text
from megalith.cli.paths import path_argument
from megalith.recipe_files import recipe_names, recipe_purpose, recipe_text

__all__ = ["app", "complete_recipe"]

app = typer.Typer(no_args_is_help=True)


def complete_recipe(incomplete: str) -> list[tuple[str, str]]:
    """Shell completion: the recipes whose names begin with ``incomplete``, each with its purpose."""
    return [(name, recipe_purpose(name)) for name in recipe_names() if name.startswith(incomplete)]


Name = Annotated[str, typer.Argument(help="A recipe's name.", metavar="NAME", autocompletion=complete_recipe)]


@app.callback()
def recipes() -> None:
    """List, show or copy the recipes that come with the package."""


@app.command("list")
def list_recipes() -> None:
    """List every recipe and its purpose."""
    width = max(map(len, recipe_names()))
    for name in recipe_names():
        show_text(f"{name:<{width}}  {recipe_purpose(name)}")


@app.command()
def show(name: Name) -> None:
    """Print a recipe's settings."""
    show_text(recipe_text(name), end="")


@app.command()
def copy(
    name: Name,
    to: Annotated[Path | None, path_argument("The file to write, or its folder; by default NAME.yaml.", "FILE")] = None,
) -> None:
    """Copy a recipe to a file of your own, to edit it."""
    from megalith.errors import ConfigError
    from megalith.storage import explained

    text = recipe_text(name)
    path = Path() if to is None else to
    with explained("write", path):
        if path.is_dir():
            path = path / f"{name}.yaml"
        if path.suffix not in (".yaml", ".yml"):
            raise ConfigError(f"{path} must end in .yaml; otherwise `megalith train` looks for a recipe of that name")
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError as error:
            raise ConfigError(f"{path} already exists and is not overwritten; choose another name") from error
    show_text(f"{path}: edit it, then run: megalith train {path} data.train=PREFIX")
