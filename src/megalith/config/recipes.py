"""The recipes and presets that come with the package, as settings."""

import functools
from typing import Any

from megalith.config.yaml_text import read_yaml
from megalith.recipe_files import preset_names, preset_text, recipe_names, recipe_text

__all__ = ["known_preset", "preset_names", "read_preset", "read_recipe", "recipe_names"]


def read_recipe(name: str) -> Any:
    """Returns the settings tree of the recipe ``name``, one of ``recipe_names()``."""
    return read_yaml(recipe_text(name), f"recipe {name}")


def read_preset(name: str) -> dict[str, Any]:
    """Returns the fields of ``model`` that the preset ``name``, one of ``preset_names()``, stands for."""
    return dict(_preset(name))


def known_preset(name: str) -> str:
    """Returns ``name``; raises ValueError if there is no such preset."""
    if name not in preset_names():
        raise ValueError(f"must be one of {', '.join(preset_names())}")
    return name


@functools.cache
def _preset(name: str) -> dict[str, Any]:
    fields: dict[str, Any] = read_yaml(preset_text(name), f"preset {name}")
    return fields
