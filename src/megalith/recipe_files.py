"""The recipes (whole runs) and presets (model shapes) shipped with the package, as unparsed files.

Separate from ``config``, because listing their names, for example in shell completion, should not have to import it.
"""

import functools
from difflib import get_close_matches
from importlib.resources import files
from importlib.resources.abc import Traversable

from megalith.errors import ConfigError

__all__ = ["preset_names", "preset_text", "recipe_names", "recipe_purpose", "recipe_text", "require_source"]


@functools.cache
def recipe_names() -> tuple[str, ...]:
    """Returns the names that ``megalith train NAME`` accepts."""
    return _names(_folder())


@functools.cache
def preset_names() -> tuple[str, ...]:
    """Returns the names that ``model.preset`` accepts."""
    return _names(_folder() / "presets")


def recipe_text(name: str) -> str:
    """Returns the YAML of the recipe ``name``. Raises ConfigError, listing the available names."""
    if name not in recipe_names():
        near = get_close_matches(name, recipe_names(), 1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"there is no recipe {name}; {meant}available recipes: {', '.join(recipe_names())}")
    return _folder().joinpath(f"{name}.yaml").read_text("utf-8")


def recipe_purpose(name: str) -> str:
    """Returns what the recipe ``name`` is for, in one line: its leading comment."""
    lines: list[str] = []
    for line in recipe_text(name).splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return " ".join(lines)


def preset_text(name: str) -> str:
    """Returns the YAML of the preset ``name``, one of ``preset_names()``."""
    return _folder().joinpath("presets", f"{name}.yaml").read_text("utf-8")


def require_source(source: str | None) -> str:
    """Returns ``source``, a command's recipe or file. Raises ConfigError listing the recipes if it was not given."""
    if source is None or "=" in source:
        error = ConfigError(
            f"give a recipe or a YAML file first: {', '.join(recipe_names())}; "
            "for example: megalith train llama-4m data.train=PREFIX"
        )
        error.on_every_rank = True  # all ranks have the same command line
        raise error
    return source


def _folder() -> Traversable:
    return files("megalith") / "recipes"


def _names(folder: Traversable) -> tuple[str, ...]:
    names = [entry.name for entry in folder.iterdir()]
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))
