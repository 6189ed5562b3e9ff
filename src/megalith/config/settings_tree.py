"""The tree of settings as a table of dotted names, and a raw tree as a draft for the rules."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from megalith.config.draft import Draft, Fix
from megalith.config.run_config import RunConfig
from megalith.config.settings_group import Follows, SettingsGroup, given_fields

__all__ = ["FIELDS", "GROUPS", "applied", "draft_of", "explicit_names", "plain_tree"]

GROUPS: Mapping[str, type[SettingsGroup]] = MappingProxyType(
    {
        name: field.annotation
        for name, field in RunConfig.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, SettingsGroup)
    }
)


def _fields() -> Iterator[tuple[str, FieldInfo]]:
    for name, field in RunConfig.model_fields.items():
        if name in GROUPS:
            yield from ((f"{name}.{leaf}", part) for leaf, part in GROUPS[name].model_fields.items())
        else:
            yield name, field


# every setting by its dotted name, in the order of the tree
FIELDS: Mapping[str, FieldInfo] = MappingProxyType(dict(_fields()))


def plain_tree(source: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``source`` with every group a dict, and names text; group objects give what was set of them."""
    tree = {str(name): value for name, value in source.items()}
    for name in GROUPS:
        group = tree.get(name)
        if isinstance(group, SettingsGroup):
            tree[name] = given_fields(group)
        elif isinstance(group, Mapping):
            tree[name] = {str(field): value for field, value in group.items()}
        elif group is None:
            tree[name] = {}
    return tree


def explicit_names(tree: Mapping[str, Any]) -> Iterator[str]:
    """Dotted names of what a plain tree sets, null not counted; also names that are no settings."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from (f"{name}.{leaf}" for leaf, part in value.items() if part is not None)
        elif value is not None:
            yield name


def applied(tree: Mapping[str, Any], fix: Fix) -> dict[str, Any]:
    """A copy of a plain tree with ``fix`` applied; a value of None takes the setting out, and empties a group."""
    changed = {name: dict(value) if isinstance(value, Mapping) else value for name, value in tree.items()}
    for name, value in fix.items():
        group, dot, leaf = name.partition(".")
        if dot and not isinstance(changed.get(group), dict):
            changed[group] = {}
        place, key = (changed[group], leaf) if dot else (changed, group)
        place.pop(key, None)
        if name in GROUPS:
            changed[name] = value or {}
        elif value is not None:
            place[key] = value
    return changed


def draft_of(tree: Mapping[str, Any], malformed: set[str], world_size: int | None) -> Draft:
    """The draft of a plain tree: what is set and not ``malformed``, the preset's fields, and all defaults."""
    tree = RunConfig.complete(tree)
    values: dict[str, Any] = {}
    given: set[str] = set()
    for group, settings in GROUPS.items():
        fields = tree.get(group)
        fields = settings.complete(fields) if isinstance(fields, Mapping) else {}
        known: dict[str, Any] = {}
        for name, field in settings.model_fields.items():
            dotted = f"{group}.{name}"
            if name in fields:
                if dotted in malformed:
                    continue
                known[name] = fields[name]
                given.add(dotted)
            elif (value := _default(field, known)) is not None:
                known[name] = value
        values.update({f"{group}.{name}": value for name, value in known.items()})
    for name in RunConfig.model_fields.keys() - GROUPS.keys() - malformed:
        values[name] = tree.get(name, RunConfig.model_fields[name].default)
        given.update({name} & tree.keys())
    return Draft(values, frozenset(given), world_size)


def _default(field: FieldInfo, known: dict[str, Any]) -> Any:
    """The default of ``field`` beside the fields ``known`` so far; None if it has none, or follows an unknown one."""
    if isinstance(field.default_factory, Follows):
        try:
            return field.default_factory.work_out(known)
        except KeyError:
            return None
    return None if field.default is PydanticUndefined else field.default
