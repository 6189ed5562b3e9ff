"""From a YAML file, a recipe or a mapping, and overrides, to a run's settings; and back to YAML."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from megalith.config.nearest import nearest_setting
from megalith.config.recipes import read_recipe, recipe_names
from megalith.config.relevance import has_effect
from megalith.config.run_config import RunConfig
from megalith.config.settings_group import SettingsGroup, reads_of
from megalith.config.settings_tree import FIELDS, GROUPS, explicit_names, plain_tree
from megalith.config.suggestions import violations
from megalith.config.yaml_text import read_override, read_yaml, write_yaml
from megalith.errors import ConfigError

__all__ = ["as_tree", "dump_yaml", "load_run", "read_tree", "unread"]

# settings that loading itself has put to use
_READ_BY_LOADING = frozenset({"model.preset", "experimental"})


def load_run(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), *, world_size: int | None = None
) -> RunConfig:
    """The settings of a run, checked, with every default that depends on other fields worked out.

    Args:
        source: a YAML file, the name of a recipe, or a tree of settings (groups may be mappings or group objects).
        overrides: ``name=value`` each, in order, where the value is YAML: ``optim.lr=3e-4``, ``load=null``.
        world_size: ranks of the run, to check the layout too.

    Raises:
        ConfigError: the source cannot be read, or the settings are not valid; it lists all violations at once.
    """
    tree = read_tree(source, overrides)
    if found := violations(tree, world_size):
        count = f"{len(found)} settings are" if len(found) > 1 else "a setting is"
        raise ConfigError("\n".join([f"{count} wrong:", *(f"  {line}" for line in found)]))
    config = RunConfig.model_validate(tree)
    for name in explicit_names(tree):
        group, field = _place(config, name)
        reads_of(group).explicit |= {field}
    return config


def read_tree(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The tree of settings that ``source`` and ``overrides`` spell, groups as dicts, not checked."""
    tree = plain_tree(source if isinstance(source, Mapping) else _read(source))
    for text in overrides:
        name, value = read_override(text)
        group, dot, leaf = name.partition(".")
        if name not in FIELDS:
            raise ConfigError(f"override {text!r}: {_why_no_setting(name)}")
        if isinstance(value, int | float) and str in (annotation := FIELDS[name].annotation, *get_args(annotation)):
            value = text.partition("=")[2].strip()  # a shell has eaten the quotes of run='2024'
        if not dot:
            tree[name] = value
        elif isinstance(tree[group], dict):
            tree[group][leaf] = value
    return tree


def as_tree(config: RunConfig) -> dict[str, Any]:
    """The tree of ``config`` in plain values, complete but for settings without effect; ``load_run`` reads it back."""
    values = config.model_dump(mode="json")
    flat = {name: values[name] for name in FIELDS if "." not in name}
    flat |= {f"{group}.{field}": value for group in GROUPS for field, value in values[group].items()}
    tree: dict[str, Any] = {}
    for name in RunConfig.model_fields:
        if name in GROUPS:
            tree[name] = {
                field: value for field, value in values[name].items() if has_effect(f"{name}.{field}", flat.__getitem__)
            }
        else:
            tree[name] = values[name]
    return tree


def dump_yaml(config: RunConfig) -> str:
    """``config`` as a YAML file that ``load_run`` reads back as an equal one."""
    return write_yaml(as_tree(config))


def unread(config: RunConfig) -> list[str]:
    """Dotted names of settings that a file or an override set and no code has read since ``load_run``."""
    groups: dict[str, SettingsGroup] = {f"{name}.": config.__dict__[name] for name in GROUPS}
    names = [
        prefix + field
        for prefix, group in {"": config, **groups}.items()
        for field in sorted(reads_of(group).explicit - reads_of(group).seen)
    ]
    return [name for name in names if name not in _READ_BY_LOADING]


def _read(source: str | Path) -> Mapping[str, Any]:
    path = Path(source)
    if isinstance(source, str) and path.suffix not in (".yaml", ".yml") and path.name == source:
        if source not in recipe_names():
            raise ConfigError(
                f"there is no recipe {source}; use one of {', '.join(recipe_names())}, or the path of a .yaml file"
            )
        tree = read_recipe(source)
    else:
        try:
            tree = read_yaml(path.read_text("utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"settings cannot be read from {path}: {error}; recipes are {', '.join(recipe_names())}"
            ) from error
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{source} must hold groups of settings (model:, data:, train:, ...); got {tree!r:.80}")
    return tree


def _place(config: RunConfig, name: str) -> tuple[SettingsGroup, str]:
    """The group object that holds the setting ``name``, and the field's name in it."""
    group, dot, field = name.partition(".")
    return (config.__dict__[group], field) if dot else (config, group)


def _why_no_setting(name: str) -> str:
    if name in GROUPS:
        fields = ", ".join(GROUPS[name].model_fields)
        return f"{name} is a group; override one of its fields: {fields}"
    near = nearest_setting(name)
    return f"there is no setting {name}" + (f"; did you mean {near}?" if near else "")
