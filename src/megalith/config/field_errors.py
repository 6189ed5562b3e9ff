"""Errors in single fields: unknown, missing, or of the wrong type or range, each with possible fixes."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined

from megalith.config.batch_size_schedule import mend_batch_size_schedule
from megalith.config.data_config import PREFIX_KINDS, PREFIX_SETTINGS
from megalith.config.data_rules import fixes_of_a_list
from megalith.config.dotted import look_up, parent
from megalith.config.draft import Fix, Violation
from megalith.config.moved import MOVED
from megalith.config.nearest import nearest_group, nearest_setting
from megalith.config.recipes import preset_names
from megalith.config.relevance import CONDITIONS, has_effect
from megalith.config.run_config import RunConfig
from megalith.config.settings_group import FIELDS_ALONE
from megalith.config.settings_tree import ENTRIES, FIELDS, GROUPS, applied, values_of
from megalith.config.yaml_text import read_yaml
from megalith.errors import ConfigError

__all__ = ["field_violations"]

_LONGEST_SHOWN = 200  # characters of a wrong value
_SHAPE = ("model.num_layers", "model.hidden_size", "model.num_attention_heads")


def field_violations(tree: Mapping[str, Any]) -> tuple[list[Violation], set[str]]:
    """Returns the violations of single fields in a plain tree, and the dotted names of the malformed fields."""
    values = ((name, look_up(tree, name)) for name in GROUPS)
    no_groups = {name: value for name, value in values if not isinstance(value, Mapping | None)}
    found = [_not_a_group(name, value) for name, value in no_groups.items()]
    malformed: set[str] = set()
    value_of = values_of(tree)
    for error in _errors(applied(tree, {name: {} for name in no_groups})):
        name, inside = _place(error)
        if name not in FIELDS:
            found.append(_unknown(name, error["input"], tree))
            continue
        malformed.add(name)
        if inside:
            found.append(_malformed_inside(name, inside, error, tree))
        elif error["type"] != "missing" and error["input"] is not None:
            found.append(_malformed(name, error))
        elif has_effect(parent(name), value_of):  # otherwise the group itself is reported
            found.append(_missing(name, tree, value_of))
    if "model.preset" in malformed:  # the shape would come from the preset
        found = [violation for violation in found if violation.rule != "missing" or violation.name not in _SHAPE]
    return found, malformed


def _errors(tree: Mapping[str, Any]) -> Iterator[ErrorDetails]:
    """Yields pydantic's errors about single fields; the rules report those about whole groups, with better messages."""
    try:
        RunConfig.model_validate(tree, context=FIELDS_ALONE)
    except ValidationError as problem:
        for error in problem.errors(include_url=False):
            name, _ = _place(error)
            of_a_group = error["type"] == "value_error" and name not in FIELDS
            if not of_a_group and error["type"] != "default_factory_not_called" and not _is_long_enough(error):
                yield error


def _is_long_enough(error: ErrorDetails) -> bool:
    """Returns whether a list is only too short because pydantic counts no entries that are malformed themselves."""
    return error["type"] == "too_short" and len(error["input"]) >= error["ctx"]["min_length"]


def _place(error: ErrorDetails) -> tuple[str, tuple[int | str, ...]]:
    """Returns the dotted name that an error is about, and the location inside its value."""
    loc, depth = error["loc"], 1
    while depth < len(loc) and ".".join(map(str, loc[:depth])) in GROUPS:
        depth += 1
    inside = loc[depth:]
    if inside and inside[0] in PREFIX_KINDS:
        inside = inside[1:2]  # without the marker of an error about a key
    return ".".join(map(str, loc[:depth])), inside


def _not_a_group(name: str, value: Any) -> Violation:
    return Violation("group", name, f"{name} must be a group of settings; got {_shown(value)}", ({name: None},))


def _unknown(name: str, value: Any, tree: Mapping[str, Any]) -> Violation:
    if name in MOVED:
        message = f"{name} is now {MOVED[name]}, and both are given"
        return Violation("unknown", name, message, ({name: None},))
    if isinstance(value, Mapping):
        moved = {near: part for leaf, part in value.items() if (near := nearest_setting(f"{name}.{leaf}"))}
        near_group = nearest_group(name)
        siblings = [group for group in GROUPS if parent(group) == parent(name)]
        meant = f"did you mean {near_group}?" if near_group else f"available groups: {', '.join(siblings or GROUPS)}"
        return Violation("unknown", name, f"there is no group {name}; {meant}", ({**moved, name: None}, {name: None}))
    near = nearest_setting(name)
    if near is None:
        return Violation("unknown", name, f"there is no setting {name}", ({name: None},))
    is_set = look_up(tree, near) is not None
    fixes: tuple[Fix, ...] = ({name: None},) if is_set else ({near: value, name: None}, {name: None})
    return Violation("unknown", name, f"there is no setting {name}; did you mean {near}?", fixes)


def _missing(name: str, tree: Mapping[str, Any], value_of: Callable[[str], Any]) -> Violation:
    examples: list[Fix] = [{name: example} for example in FIELDS[name].examples or ()]
    message = f"{name} is missing"
    if name in _SHAPE and all(look_up(tree, part) is None for part in _SHAPE):
        message = f"{name} is missing, and model.preset is not set either (one of {', '.join(preset_names())})"
        examples = [{"model.preset": preset} for preset in FIELDS["model.preset"].examples or ()] + examples
    elif (condition := CONDITIONS.get(parent(name))) is not None:
        message = f"{name} is missing: {condition.setting}={value_of(condition.setting)} needs it"
    return Violation("missing", name, message, tuple(examples))


def _malformed(name: str, error: ErrorDetails) -> Violation:
    message, fixes = f"{name} {_wanted(error)}; got {_shown(error['input'])}", list(_replacements(name, error))
    if name in PREFIX_SETTINGS and isinstance(error["input"], list):
        message = f"{name} must be a prefix, or several by name: {{web: PREFIX, code: PREFIX}}; got {error['input']}"
        fixes = [*fixes_of_a_list(name, error["input"]), *_defaults(name)]
    return Violation("malformed", name, message, tuple(fixes))


def _malformed_inside(
    name: str, inside: tuple[int | str, ...], error: ErrorDetails, tree: Mapping[str, Any]
) -> Violation:
    """Returns the violation of an entry of a list or mapping, or of a field of a list entry."""
    index, *field = inside
    entries: Any = look_up(tree, name)
    if isinstance(entries, Mapping) and not isinstance(index, str):
        message = f"the names in {name} must be text; got {index!r}: write it in quotes, '{index}'"
        quoted = {name: {str(key): value for key, value in entries.items()}}
        return Violation("malformed", name, message, (quoted, *_defaults(name)))
    where = ".".join([f"{name}[{index}]" if isinstance(index, int) else f"{name}.{index}", *map(str, field)])
    message = f"{where} {_wanted(error)}; got {_shown(error['input'])}"
    entries = list(entries)
    fixes: list[Fix] = []
    if isinstance(index, int) and field and isinstance(entries[index], Mapping):
        without = {key: value for key, value in entries[index].items() if key != field[0]}
        near = get_close_matches(str(field[0]), ENTRIES[name].model_fields, 1)
        mended = [{**without, key: error["input"]} for key in near if key not in without] + [without]
        fixes = [{name: [*entries[:index], entry, *entries[index + 1 :]]} for entry in mended]
        if error["type"] == "extra_forbidden":
            message = f"{where} is not a setting" + (f"; did you mean {near[0]}?" if near else "")
    if isinstance(index, int) and error["type"] == "literal_error" and isinstance(error["input"], str):
        near = get_close_matches(error["input"], _choices(error["ctx"]), 1, cutoff=0.5)
        fixes = [{name: [*entries[:index], choice, *entries[index + 1 :]]} for choice in near]
    if isinstance(index, int) and (left := entries[:index] + entries[index + 1 :]):
        fixes.append({name: left})
    return Violation("malformed", where, message, (*fixes, *_defaults(name)))


def _shown(value: Any) -> str:
    """Returns the repr of ``value``, truncated if it is long."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _replacements(name: str, error: ErrorDetails) -> Iterator[Fix]:
    """Yields possible values for ``name``, the nearest to the given one first."""
    value, context = error["input"], error.get("ctx", {})
    if isinstance(value, str):
        yield from ({name: choice} for choice in _nearest_choices(name, value, context))
        with suppress(ConfigError):
            if (number := read_yaml(value, name)) is not None:  # "8" where 8 is expected
                yield {name: number}
    elif value != {}:  # an empty mapping was never meant as text
        yield {name: str(value)}
        if isinstance(value, float) and value.is_integer():
            yield {name: int(value)}
    yield {name: [value]}
    yield from ({name: context[bound]} for bound in ("ge", "le") if bound in context)
    yield from _defaults(name)


def _defaults(name: str) -> Iterator[Fix]:
    field = FIELDS[name]
    if field.default is not PydanticUndefined and field.default is not None:
        yield {name: list(field.default) if isinstance(field.default, tuple) else field.default}
    yield from ({name: example} for example in field.examples or ())
    yield {name: None}


def _nearest_choices(name: str, value: str, context: Mapping[str, Any]) -> list[str]:
    if name == "train.batch_size_schedule":
        mended = mend_batch_size_schedule(value)
        return [mended] if mended else []
    choices = list(preset_names()) if name == "model.preset" else _choices(context)
    spelled = {choice.lower(): choice for choice in choices}
    near = [spelled[close] for close in get_close_matches(value.lower(), spelled, 3, cutoff=0.5)]
    return [*near, *(choice for choice in choices if choice not in near)]


def _choices(context: Mapping[str, Any]) -> list[str]:
    """Returns the choices of a Literal, which pydantic lists as: 'a', 'b' or 'c'."""
    return re.findall(r"'([^']*)'", str(context.get("expected", "")))


def _wanted(error: ErrorDetails) -> str:
    describe = _WANTED.get(error["type"])
    return describe(error.get("ctx", {})) if describe else f"is invalid ({error['msg']})"


def _entries(count: int) -> str:
    return "1 entry" if count == 1 else f"{count} entries"


_WANTED: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "bool_type": lambda _: "must be true or false",
    "int_type": lambda _: "must be an integer",
    "float_type": lambda _: "must be a number",
    "finite_number": lambda _: "must be finite",
    "string_type": lambda _: "must be text",
    "string_unicode": lambda _: "must be text in UTF-8",
    "string_too_short": lambda _: "must not be empty",
    "tuple_type": lambda _: "must be a list",
    "dict_type": lambda _: "must be numbers by name, such as {web: 0.7, code: 0.3}",
    "model_type": lambda _: "must be a group of settings",
    "missing": lambda _: "must be given",
    "too_long": lambda context: f"must have at most {_entries(context['max_length'])}",
    "too_short": lambda context: f"must have at least {_entries(context['min_length'])}",
    "greater_than": lambda context: f"must be above {context['gt']}",
    "greater_than_equal": lambda context: f"must be at least {context['ge']}",
    "less_than": lambda context: f"must be below {context['lt']}",
    "less_than_equal": lambda context: f"must be at most {context['le']}",
    "literal_error": lambda context: f"must be {context['expected']}",
    "value_error": lambda context: str(context["error"]),
}
