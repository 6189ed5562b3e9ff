"""The page docs/settings.md, written from the declarations of the settings and of the rules between them."""

import sys
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from megalith.config.experimental import FEATURES
from megalith.config.moved import MOVED
from megalith.config.optim_config import ParamGroupOverride
from megalith.config.recipes import preset_names, recipe_names
from megalith.config.relevance import CONDITIONS
from megalith.config.rules import RUN_RULES
from megalith.config.run_config import RunConfig
from megalith.config.settings_group import SettingsGroup
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
- A group inside a group, such as `optim.adamw`, is one more level of the file, and one more dot in an override:
  `optim.adamw.eps=1e-6`. Some have an effect beside one value of another field only, which their row gives; others are
  off until one of their fields is set, and off again with `null`, as in `train.evaluation=null`.
- Names of earlier versions, at the end of this page, are still read, with a line in the log that gives the new one.
"""


def settings_page() -> str:
    """The text of docs/settings.md: every field with its default, unit and meaning, and the rules between fields."""
    lines = [
        _INTRODUCTION.format(
            recipes=", ".join(recipe_names()),
            presets=", ".join(preset_names()),
            features=", ".join(FEATURES),
        )
    ]
    lines += ["## The run", "", *_table(RunConfig)]
    for name, group in GROUPS.items():
        heading = "#" * (2 + name.count("."))
        lines += [f"{heading} {name}", "", _first_line(group), "", *_table(group)]
    lines += ["### An entry of optim.overrides", "", _first_line(ParamGroupOverride), "", *_table(ParamGroupOverride)]
    lines += ["## Rules between fields", "", *(f"- {_first_line(rule)}" for rule in RUN_RULES), ""]
    lines += ["## Names of earlier versions", "", "| earlier | now |", "| --- | --- |"]
    lines += [*(f"| `{old}` | `{new}` |" for old, new in MOVED.items()), ""]
    return "\n".join(lines)


def _table(settings: type[SettingsGroup]) -> Iterator[str]:
    yield "| field | type | default | unit | meaning |"
    yield "| --- | --- | --- | --- | --- |"
    for name, field in settings.model_fields.items():
        if name in settings.nested_groups and not settings.dotted_name:
            continue  # it has a heading of its own, of the first level
        condition = CONDITIONS.get(settings.name_of(name))
        only = f"; only {condition}" if condition is not None else ""
        unit, _, meaning = (field.description or "").rpartition("] ")
        if name in settings.nested_groups:
            is_off = condition is None and settings.is_optional(name)
            kind, default = f"group {settings.name_of(name)}", "`null`" if is_off else "worked out"
        else:
            kind, default = _type(field.annotation), _default(field)
        cells = (f"`{name}`", kind, default, unit.removeprefix("["), meaning + only)
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
    if origin is Mapping:
        return f"{_type(arguments[1])} by name"
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
