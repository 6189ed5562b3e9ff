"""The page docs/settings.md, written from the declarations of the settings and of the rules between them."""

import sys
import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from megalith.config.experimental import FEATURES
from megalith.config.optim_config import ParamGroupOverride
from megalith.config.recipes import preset_names, recipe_names
from megalith.config.rules import RUN_RULES
from megalith.config.run_config import RunConfig
from megalith.config.settings_tree import GROUPS
from megalith.config.yaml_text import write_override

__all__ = ["settings_page"]

_INTRODUCTION = """\
# Settings

Written from the code by `python -m megalith.config.settings_page`; do not edit it here.

A run is one tree of settings, read from a YAML file or from a recipe of the package, and any field can be given again
as an override, where the value is YAML:

    megalith train llama-4m data.train=corpus optim.lr=3e-4 optim.overrides='[{{match: "*embed*", max_lr: 1e-4}}]'

- Recipes, which are whole runs but for their data: {recipes}.
- Presets, which are shapes for `model.preset`: {presets}. Fields of `model` that are set beside one override it.
- Experimental features, each named in `experimental` by the run that uses it: {features}.
- `null` means that a field is not set: it takes its default, also where the file or the recipe says otherwise.
- An unknown name, a value of another type, a field that has no effect beside the others: each is an error. All are
  reported at once, each with a change that mends it.
- A field that was set and that no code reads stops the run.
"""


def settings_page() -> str:
    """The text of docs/settings.md: every field with its default, unit and meaning, and the rules between fields."""
    lines = [
        _INTRODUCTION.format(
            recipes=", ".join(recipe_names()), presets=", ".join(preset_names()), features=", ".join(FEATURES)
        )
    ]
    top = {name: field for name, field in RunConfig.model_fields.items() if name not in GROUPS}
    lines += ["## The run", "", *_table(top)]
    for name, group in GROUPS.items():
        lines += [f"## {name}", "", _first_line(group), "", *_table(group.model_fields)]
    lines += ["### An entry of optim.overrides", "", _first_line(ParamGroupOverride), ""]
    lines += _table(ParamGroupOverride.model_fields)
    lines += ["## Rules between fields", "", *(f"- {_first_line(rule)}" for rule in RUN_RULES), ""]
    return "\n".join(lines)


def _table(fields: dict[str, FieldInfo]) -> Iterator[str]:
    yield "| field | type | default | unit | meaning |"
    yield "| --- | --- | --- | --- | --- |"
    for name, field in fields.items():
        unit, _, meaning = (field.description or "").rpartition("] ")
        cells = (f"`{name}`", _type(field.annotation), _default(field), unit.removeprefix("["), meaning)
        yield f"| {' | '.join(cells)} |"
    yield ""


def _type(annotation: Any) -> str:
    """An annotation in a YAML user's words."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return ", ".join(_type(argument) for argument in arguments)
    if origin is typing.Annotated:
        return _type(arguments[0])
    if origin is tuple:
        kind = "entries, below" if arguments[0] is ParamGroupOverride else _type(arguments[0])
        return f"list of {kind}{'s' if kind == 'number' else ''}"
    return {int: "whole number", float: "number", bool: "true or false", str: "text", type(None): "null"}[annotation]


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "worked out"
    if field.default is PydanticUndefined:
        return "required"
    default = list(field.default) if isinstance(field.default, tuple) else field.default
    return f"`{write_override('', default)[1:]}`"


def _first_line(described: Any) -> str:
    return str(described.__doc__).partition("\n")[0]


if __name__ == "__main__":
    sys.stdout.write(settings_page())
