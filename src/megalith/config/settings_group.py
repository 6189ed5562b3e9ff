"""The base of every group of settings: frozen, closed to unknown names, and aware of which fields have been read.

A field that somebody set and no code reads is a slip on one side or the other, so reading is recorded: each field is
a descriptor that notes its name (about 0.2 microseconds). Printing, dumping, comparing, hashing and copying go through
``__dict__`` and note nothing. A copy shares the record of its original.
"""

from collections.abc import Callable, Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, PrivateAttr, model_validator

__all__ = ["FieldReads", "Follows", "SettingsGroup", "given_fields", "reads_of"]


class FieldReads:
    """Of one group: the fields that the user set (``explicit``), and those that code has read (``seen``)."""

    __slots__ = ("explicit", "seen")

    def __init__(self) -> None:
        self.explicit: frozenset[str] = frozenset()
        self.seen: set[str] = set()

    def __eq__(self, other: object) -> bool:
        # pydantic compares private attributes too, and who has read a setting is no part of its value
        return isinstance(other, FieldReads)

    __hash__ = None  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class Follows:
    """A default factory: ``work_out`` gives the default from the fields before it, and KeyError if one is missing."""

    def __init__(self, work_out: Callable[[Mapping[str, Any]], Any]) -> None:
        self.work_out = work_out

    def __call__(self, fields: dict[str, Any]) -> Any:
        try:
            return self.work_out(fields)
        except KeyError:
            return 1  # pydantic before 2.13 asks although a field is malformed; the group is refused in any case


class SettingsGroup(BaseModel):
    """A frozen record of settings. ``null`` for any field means that it is not set."""

    # strict: "8" is not 8, and true is not 1
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    _reads: FieldReads = PrivateAttr(default_factory=FieldReads)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        for name in cls.model_fields:
            setattr(cls, name, _NotedField(name))

    @classmethod
    def complete(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        """``fields`` without those that are null; groups that fill in fields of their own extend this."""
        return {name: value for name, value in fields.items() if value is not None or name not in cls.model_fields}

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, fields: Any) -> Any:
        return cls.complete(fields) if isinstance(fields, Mapping) else fields


def reads_of(group: SettingsGroup) -> FieldReads:
    """The record of what was set and read of ``group``."""
    return group._reads


def given_fields(group: SettingsGroup) -> dict[str, Any]:
    """The fields that ``group`` was made from; no read is noted."""
    return {name: group.__dict__[name] for name in group.model_fields_set}


class _NotedField:
    """Data descriptor over a field, so that it wins over the ``__dict__`` where pydantic keeps the value."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, group: SettingsGroup | None, owner: type | None = None) -> Any:
        if group is None:
            raise AttributeError(self.name)  # as for any pydantic field looked up on the class
        private = group.__pydantic_private__
        if private is not None:  # None only while pydantic still builds the group
            private["_reads"].seen.add(self.name)
        return group.__dict__[self.name]

    def __set__(self, group: SettingsGroup, value: Any) -> None:
        raise AttributeError(f"{self.name} is frozen; model_copy(update={{...}}) gives a changed copy")
