"""The recipes (whole runs) and presets (model shapes) that come with the package, by name."""

import functools
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from megalith.config.yaml_text import read_yaml

__all__ = ["known_preset", "preset_names", "read_preset", "read_recipe", "recipe_names"]


@functools.cache
def recipe_names() -> tuple[str, ...]:
    """Names that ``megalith train NAME`` takes."""
    return _names(_folder())


@functools.cache
def preset_names() -> tuple[str, ...]:
    """Names that ``model.preset`` takes."""
    return _names(_folder() / "presets")


def read_recipe(name: str) -> Any:
    """The settings tree of the recipe ``name``, one of ``recipe_names()``."""
    return read_yaml(_folder().joinpath(f"{name}.yaml").read_text("utf-8"), f"recipe {name}")


def read_preset(name: str) -> dict[str, Any]:
    """The fields of ``model`` that the preset ``name``, one of ``preset_names()``, stands for."""
    return dict(_preset(name))


def known_preset(name: str) -> str:
    """``name``; raises ValueError if there is no such preset."""
    if name not in preset_names():
        raise ValueError(f"must be one of {', '.join(preset_names())}")
    return name


@functools.cache
def _preset(name: str) -> dict[str, Any]:
    fields: dict[str, Any] = read_yaml((_folder() / "presets" / f"{name}.yaml").read_text("utf-8"), f"preset {name}")
    return fields


def _folder() -> Traversable:
    return files("megalith") / "recipes"


def _names(folder: Traversable) -> tuple[str, ...]:
    names = [entry.name for entry in folder.iterdir()]
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))
