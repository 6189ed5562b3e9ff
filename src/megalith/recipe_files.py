"""The recipes (whole runs) and presets (model shapes) that come with the package, as files: nothing is parsed here.

Apart from ``config``, because whoever asks for their names, such as a shell that completes one, should not wait for it.
"""

import functools
from difflib import get_close_matches
from importlib.resources import files
from importlib.resources.abc import Traversable

from megalith.errors import ConfigError

__all__ = ["preset_names", "preset_text", "recipe_names", "recipe_purpose", "recipe_text", "require_source"]


@functools.cache
def recipe_names() -> tuple[str, ...]:
    """Names that ``megalith train NAME`` takes."""
    return _names(_folder())


@functools.cache
def preset_names() -> tuple[str, ...]:
    """Names that ``model.preset`` takes."""
    return _names(_folder() / "presets")


def recipe_text(name: str) -> str:
    """The YAML of the recipe ``name``. Raises ConfigError with the names that there are."""
    if name not in recipe_names():
        near = get_close_matches(name, recipe_names(), 1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"there is no recipe {name}; {meant}there are {', '.join(recipe_names())}")
    return _folder().joinpath(f"{name}.yaml").read_text("utf-8")


def recipe_purpose(name: str) -> str:
    """What the recipe ``name`` is for, in a line: the comment that it begins with."""
    lines: list[str] = []
    for line in recipe_text(name).splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return " ".join(lines)


def preset_text(name: str) -> str:
    """The YAML of the preset ``name``, one of ``preset_names()``."""
    return _folder().joinpath("presets", f"{name}.yaml").read_text("utf-8")


def require_source(source: str | None) -> str:
    """``source``, the recipe or file that a command was given. Raises ConfigError naming the recipes if it was none."""
    if source is None or "=" in source:
        error = ConfigError(
            f"name a recipe or a YAML file first: {', '.join(recipe_names())}; "
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
