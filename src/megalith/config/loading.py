"""Loads a run's settings from a YAML file, a recipe or a mapping plus overrides, and writes them back to YAML."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from megalith.config.dotted import look_up, parent, put_
from megalith.config.moved import MOVED, log_moved, means_not_set
from megalith.config.nearest import nearest_setting
from megalith.config.recipes import read_recipe, recipe_names
from megalith.config.relevance import has_effect
from megalith.config.run_config import RunConfig
from megalith.config.settings_group import SettingsGroup
from megalith.config.settings_tree import FIELDS, GROUPS, plain_tree
from megalith.config.suggestions import violations
from megalith.config.yaml_text import MOST_BYTES, read_override, read_yaml, write_override, write_yaml
from megalith.errors import ConfigError
from megalith.input_file import read_regular_file

__all__ = ["as_tree", "dump_yaml", "load_run", "read_tree"]

_MOST_TOLD = 50  # violations that are listed; the rest are only counted


def load_run(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), *, world_size: int | None = None
) -> RunConfig:
    """Loads and checks the settings of a run, with all defaults that depend on other fields filled in.

    Args:
        source: a YAML file, the name of a recipe, or a tree of settings (groups may be mappings or group objects).
        overrides: ``name=value`` each, in order, where the value is YAML: ``optim.lr=3e-4``, ``load=null``.
        world_size: ranks of the run, to check the layout too.

    Raises:
        ConfigError: the source cannot be read, or the settings are not valid; the message lists all violations.
    """
    tree, found = _read_tree(source, overrides)
    if found := found + violations(tree, world_size):
        count = f"{len(found):,} settings are" if len(found) > 1 else "1 setting is"
        more = [f"  and {len(found) - _MOST_TOLD:,} more"] if len(found) > _MOST_TOLD else []
        raise ConfigError("\n".join([f"{count} invalid:", *(f"  {line}" for line in found[:_MOST_TOLD]), *more]))
    return RunConfig.model_validate(tree)


def read_tree(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the unchecked tree of settings in ``source`` and ``overrides``, with groups as dicts.

    Names from earlier versions are replaced by the current ones, with a log line that gives both.

    Raises:
        ConfigError: the source or an override cannot be read, or an override names an unknown setting.
    """
    tree, found = _read_tree(source, overrides)
    if found:
        raise ConfigError("\n".join(found))
    return tree


def as_tree(config: RunConfig) -> dict[str, Any]:
    """Returns ``config`` as a tree of plain values, without settings of no effect; ``load_run`` reads it back."""
    values = config.model_dump(mode="json")
    return _with_effect(RunConfig, values, lambda name: look_up(values, name))


def dump_yaml(config: RunConfig) -> str:
    """Returns ``config`` as YAML that ``load_run`` reads back as an equal config."""
    return write_yaml(as_tree(config))


def _read_tree(source: str | Path | Mapping[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Returns the tree of ``read_tree`` without invalid overrides, and an error message for each of those."""
    tree = plain_tree(source if isinstance(source, Mapping) else _read(source))
    wrong: list[str] = []
    read: list[tuple[str, str, Any]] = []
    for text in overrides:
        try:
            read.append((text, *read_override(text)))
        except ConfigError as error:
            wrong.append(str(error))
    given = {name for _, name, _ in read}
    for text, name, value in read:
        if MOVED.get(name) in given:
            wrong.append(f"override {text!r}: {name} is now {MOVED[name]}, and both are given; remove one of them")
            continue
        current = MOVED.get(name, name)
        if means_not_set(name, value):
            value = None
        holder = parent(current)
        if current not in FIELDS and holder in FIELDS and _is_by_name(FIELDS[holder].annotation):
            entries = look_up(tree, holder)
            if not isinstance(entries, Mapping | None):
                told = f"{write_override(holder, entries)} has no names; give all values by name"
                wrong.append(f"override {text!r}: {told}: {holder}='{{NAME: ..., NAME: ...}}'")
                continue
            entry = current.rpartition(".")[2]
            others = {key: kept for key, kept in (entries or {}).items() if key != entry}
            current, value = holder, others if value is None else {**(entries or {}), entry: value}
        if current not in FIELDS and not (value is None and _is_optional(current)):
            wrong.append(f"override {text!r}: {_why_no_setting(name)}")
            continue
        if isinstance(value, int | float) and str in _kinds(current):
            value = text.partition("=")[2].strip()  # the shell has removed the quotes of run='2024'
        _override_(tree, current, value)
    log_moved(name for name in sorted(given) if name in MOVED)
    return tree, wrong


def _read(source: str | Path) -> Mapping[str, Any]:
    path = Path(source)
    if isinstance(source, str) and path.suffix not in (".yaml", ".yml") and path.name == source:
        if source not in recipe_names():
            raise ConfigError(
                f"there is no recipe {source}; use one of {', '.join(recipe_names())}, or the path to a .yaml file"
            )
        tree = read_recipe(source)
    else:
        try:
            content = read_regular_file(path, MOST_BYTES)
        except OSError as error:
            raise ConfigError(
                f"settings cannot be read from {path}: {error.strerror}; available recipes: {', '.join(recipe_names())}"
            ) from error
        tree = read_yaml(content, str(path))
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{source} must hold groups of settings (model:, data:, train:, ...); got {tree!r:.80}")
    return tree


def _override_(tree: dict[str, Any], name: str, value: Any) -> None:
    """Sets ``name``, unless one of its groups has a value that is not a group, which is reported later."""
    group = parent(name)
    while group:
        if not isinstance(look_up(tree, group), Mapping | None):
            return
        group = parent(group)
    put_(tree, name, value)


def _kinds(name: str) -> tuple[Any, ...]:
    """Returns the types that the setting ``name`` may have; only None for a group."""
    annotation = FIELDS[name].annotation if name in FIELDS else None
    return annotation, *get_args(annotation)


def _is_by_name(annotation: Any) -> bool:
    """Returns whether a field of this type may hold values by name, which are overridden one by one."""
    return get_origin(annotation) is Mapping or any(map(_is_by_name, get_args(annotation)))


def _is_optional(name: str) -> bool:
    return name in GROUPS and "." in name and GROUPS[parent(name)].is_optional(name.rpartition(".")[2])


def _with_effect(
    settings: type[SettingsGroup], values: Mapping[str, Any], value_of: Callable[[str], Any]
) -> dict[str, Any]:
    """Returns the ``values`` of a group without fields that have no effect and without absent nested groups."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        if name not in settings.nested_groups:
            if has_effect(settings.name_of(name), value_of):
                tree[name] = value
        elif value is not None:
            tree[name] = _with_effect(settings.nested_groups[name], value, value_of)
    return tree


def _why_no_setting(name: str) -> str:
    if name in GROUPS:
        fields = ", ".join(GROUPS[name].model_fields)
        return f"{name} is a group; override one of its fields: {fields}"
    near = nearest_setting(name)
    return f"there is no setting {name}" + (f"; did you mean {near}?" if near else "")
