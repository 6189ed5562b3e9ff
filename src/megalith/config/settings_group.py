"""The base class of all groups of settings: frozen, closed to unknown names, with nested groups.

A nested group is declared as ``rope: RopeConfig | None = Field(default=None)``. If it has a condition in
``config.relevance``, it is present, with its defaults, exactly when the condition holds; otherwise it is present if
one of its fields is set.
"""

import types
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, model_validator

from megalith.config.draft import Draft
from megalith.config.relevance import CONDITIONS
from megalith.input_file import home_expanded

__all__ = [
    "FIELDS_ALONE",
    "LARGEST_COUNT",
    "LARGEST_SIZE",
    "Follows",
    "SettingsGroup",
    "draft_of_group",
    "entry_of",
    "given_fields",
    "group_at",
    "plain_fields",
    "value_in",
]

# The validation context that checks the fields of a run but not the rules: code that tries hundreds of settings checks
# the rules itself, once.
FIELDS_ALONE: Mapping[str, bool] = MappingProxyType({"fields alone": True})

# A bound on every integer keeps rules fast (they look for divisors) and products within what tensors can index.
LARGEST_SIZE = 2**31 - 1  # of a dimension, a batch, or a number of ranks
LARGEST_COUNT = 2**63 - 1  # of steps or samples


def _without_nul(path: str) -> str:
    if "\0" in path:
        raise ValueError("must not contain a NUL character, which no path can have")
    return path


FilePath = Annotated[str, Field(min_length=1), AfterValidator(_without_nul), AfterValidator(home_expanded)]
"""The path or URL of a file or folder, with ~ expanded; preflight checks whether it exists."""


class Follows:
    """A default factory: ``work_out`` computes the default from the preceding fields; KeyError if one is missing."""

    def __init__(self, work_out: Callable[[Mapping[str, Any]], Any]) -> None:
        self.work_out = work_out

    def __call__(self, fields: dict[str, Any]) -> Any:
        try:
            return self.work_out(fields)
        except KeyError:
            return 1  # pydantic before 2.13 calls this even if a field is malformed; the group is rejected anyway


class SettingsGroup(BaseModel):
    """A frozen group of settings. ``null`` means that a field is not set; a group of nulls is not set either."""

    # strict: "8" is not 8, and true is not 1
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    dotted_name: ClassVar[str] = ""  # of the group in the tree of a run
    nested_groups: ClassVar[Mapping[str, type["SettingsGroup"]]] = MappingProxyType({})  # by field

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        groups = {name: _group_of(field.annotation) for name, field in cls.model_fields.items()}
        cls.nested_groups = MappingProxyType({name: group for name, group in groups.items() if group is not None})

    @classmethod
    def name_of(cls, field: str) -> str:
        """The dotted name of ``field`` in the tree of a run."""
        return f"{cls.dotted_name}.{field}" if cls.dotted_name else field

    @classmethod
    def is_optional(cls, field: str) -> bool:
        """Whether the nested group ``field`` is optional."""
        return cls.model_fields[field].default is None

    @classmethod
    def filled_in(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Returns ``given`` with the fields that it implies; groups that have such fields override this."""
        return given

    @classmethod
    def complete(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Returns ``fields`` without nulls, with every nested group as a dict, and present if its condition holds."""
        complete = cls.filled_in(plain_fields(cls, fields))
        for name, group in cls.nested_groups.items():
            condition = CONDITIONS.get(cls.name_of(name))
            if condition is not None and condition.holds(value_in(cls, complete)(condition.setting)):
                complete.setdefault(name, {})
            if isinstance(complete.get(name), Mapping):
                complete[name] = group.complete(complete[name])
        return complete

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, fields: Any, info: ValidationInfo) -> Any:
        if info.context is FIELDS_ALONE and cls.dotted_name:
            return fields  # the run that contains the group has completed it
        return cls.complete(fields) if isinstance(fields, Mapping) else fields


def plain_fields(settings: type[SettingsGroup], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the ``fields`` that are set, with nested groups as dicts, without nulls or empty optional groups."""
    plain: dict[str, Any] = {}
    for name, value in fields.items():
        if (group := settings.nested_groups.get(name)) is not None:
            value = given_fields(value) if isinstance(value, SettingsGroup) else value
            value = plain_fields(group, value) if isinstance(value, Mapping) else value
            value = None if value == {} and settings.is_optional(name) else value
        if value is not None or name not in settings.model_fields:
            plain[name] = value
    return plain


def given_fields(group: SettingsGroup) -> dict[str, Any]:
    """Returns the fields that were given when ``group`` was constructed."""
    return {name: getattr(group, name) for name in group.model_fields_set}


def group_at(settings: type[SettingsGroup], name: str) -> type[SettingsGroup]:
    """The group with the dotted ``name`` below ``settings``."""
    for part in name.split("."):
        settings = settings.nested_groups[part]
    return settings


def value_in(settings: type[SettingsGroup], fields: Mapping[str, Any]) -> Callable[[str], Any]:
    """Returns a function that looks up one group's settings by dotted name, in ``fields`` or else the defaults."""

    def value_of(name: str) -> Any:
        field = name.removeprefix(f"{settings.dotted_name}.")
        return fields.get(field, settings.model_fields[field].default)

    return value_of


def draft_of_group(group: SettingsGroup) -> Draft:
    """Returns an already constructed group as a draft for the rules."""
    found = list(_settings_of(group))
    values = {name: value for name, value, _ in found}
    return Draft(values, frozenset(name for name, _, was_given in found if was_given))


def _settings_of(group: SettingsGroup) -> Iterator[tuple[str, Any, bool]]:
    """Yields the dotted name and value of every setting, including nested groups, and whether it was given."""
    for name, value in group:
        if isinstance(value, SettingsGroup):
            yield from _settings_of(value)
        elif name not in group.nested_groups:
            yield group.name_of(name), value, name in group.model_fields_set


def entry_of(annotation: Any) -> type[SettingsGroup] | None:
    """Returns the group that each entry of a list field is; None if the field is no list of groups."""
    return _group_of(get_args(annotation)[0]) if get_origin(annotation) is tuple else None


def _group_of(annotation: Any) -> type[SettingsGroup] | None:
    """Returns the group that a field holds, also if the field may be None; None if it holds no group."""
    kinds = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, SettingsGroup)), None)
