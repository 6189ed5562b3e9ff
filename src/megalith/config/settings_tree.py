"""The tree of settings as a table of dotted names, and the conversion of a raw tree to a draft for the rules."""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from megalith.config.dotted import look_up, put_, take_out_
from megalith.config.draft import Draft, Fix
from megalith.config.moved import rename_
from megalith.config.run_config import RunConfig
from megalith.config.settings_group import Follows, SettingsGroup, entry_of, given_fields

__all__ = ["ENTRIES", "FIELDS", "GROUPS", "applied", "draft_of", "plain_tree", "values_of"]


def _groups(settings: type[SettingsGroup]) -> Iterator[tuple[str, type[SettingsGroup]]]:
    for name, group in settings.nested_groups.items():
        yield settings.name_of(name), group
        yield from _groups(group)


def _fields(settings: type[SettingsGroup]) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in settings.model_fields.items():
        if name in settings.nested_groups:
            yield from _fields(settings.nested_groups[name])
        else:
            yield settings.name_of(name), field


# every group by its dotted name, a group before those inside it
GROUPS: Mapping[str, type[SettingsGroup]] = MappingProxyType(dict(_groups(RunConfig)))
# every setting by its dotted name, in the order of the tree; groups are not among them
FIELDS: Mapping[str, FieldInfo] = MappingProxyType(dict(_fields(RunConfig)))
# the settings that are lists of groups, and the group of an entry
ENTRIES: Mapping[str, type[SettingsGroup]] = MappingProxyType(
    {name: entry for name, field in FIELDS.items() if (entry := entry_of(field.annotation)) is not None}
)


def plain_tree(source: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of ``source`` with groups as dicts of the fields that are set, and current names as strings."""
    tree = _plain(source, RunConfig)
    rename_(tree)
    return tree


def _plain(source: Mapping[str, Any], settings: type[SettingsGroup]) -> dict[str, Any]:
    tree = {str(name): value for name, value in source.items()}
    for name, group in settings.nested_groups.items():
        value = tree.get(name)
        value = given_fields(value) if isinstance(value, SettingsGroup) else value
        if isinstance(value, Mapping):
            tree[name] = _plain(value, group)
        elif value is None and not settings.is_optional(name):
            tree[name] = {}
    return tree


def applied(tree: Mapping[str, Any], fix: Fix) -> dict[str, Any]:
    """Returns a copy of a plain tree with ``fix`` applied; a value of None removes a setting, or empties a group."""
    changed = _copied(tree)
    for name, value in fix.items():
        if value is None:
            take_out_(changed, name)
            if name in RunConfig.nested_groups:
                changed[name] = {}
        else:
            put_(changed, name, value)
    return changed


def _copied(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _copied(value) if isinstance(value, Mapping) else value for name, value in tree.items()}


def values_of(tree: Mapping[str, Any]) -> Callable[[str], Any]:
    """Returns a function that looks up settings of a plain tree by dotted name: the value set, or else the default."""
    complete = RunConfig.complete(tree)

    def value_of(name: str) -> Any:
        value = look_up(complete, name)
        return FIELDS[name].default if value is None else value

    return value_of


def draft_of(tree: Mapping[str, Any], malformed: set[str], world_size: int | None) -> Draft:
    """Returns the draft of a plain tree: settings that are set and not ``malformed``, the preset's, and defaults."""
    values: dict[str, Any] = {}
    given: set[str] = set()

    def add(settings: type[SettingsGroup], fields: Mapping[str, Any]) -> None:
        known: dict[str, Any] = {}
        for name, field in settings.model_fields.items():
            dotted = settings.name_of(name)
            if (group := settings.nested_groups.get(name)) is not None:
                nested = fields.get(name)
                if nested is not None or not settings.is_optional(name):
                    add(group, nested if isinstance(nested, Mapping) else {})
            elif name in fields:
                if dotted not in malformed:
                    known[name] = fields[name]
                    given.add(dotted)
            elif (value := _default_beside(field, known)) is not None:
                known[name] = value
        values.update({settings.name_of(name): value for name, value in known.items()})

    add(RunConfig, RunConfig.complete(tree))
    return Draft(values, frozenset(given), world_size)


def _default_beside(field: FieldInfo, known: dict[str, Any]) -> Any:
    """Returns the default of ``field`` given the fields ``known``; None if it has none, or needs an unknown field."""
    if isinstance(field.default_factory, Follows):
        try:
            return field.default_factory.work_out(known)
        except KeyError:
            return None
    return None if field.default is PydanticUndefined else field.default
