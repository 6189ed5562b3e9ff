"""Values out of a JSON file that anyone may have written: each is asked for by name and kind, and refused by both."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megalith.errors import CheckpointError

__all__ = ["MOST_COUNTED", "WAY_OUT", "JsonFields", "float_sized", "shown"]

WAY_OUT = "use an older checkpoint, or copy this one again from where it came"

# no run counts further, and sample numbers times the tokens of a sample stay within int64
MOST_COUNTED = 10**14
_SHOWN = 100  # characters of a value in a message


def shown(value: Any) -> str:
    """``value`` as JSON, cut where it is long."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return "something nested too deeply"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def float_sized(digits: str) -> int:
    """An integer of JSON, for ``json.loads(..., parse_int=float_sized)``. Raises ValueError where no float holds it."""
    number = int(digits)
    if abs(number) > sys.float_info.max:
        raise ValueError(f"an integer of {len(digits)} digits")
    return number


@dataclass(frozen=True)
class JsonFields:
    """The JSON object ``values``, which its file has under the dotted ``name``; empty for the file itself.

    Every method raises CheckpointError, with the field's dotted name, what is wanted and what is there.
    """

    values: Mapping[str, Any]
    name: str = ""

    def count(self, field: str, *, at_least: int = 0, at_most: int = MOST_COUNTED) -> int:
        """A whole number; neither ``true`` nor ``2.0`` is one."""
        value = self.values.get(field)
        if type(value) is not int or not at_least <= value <= at_most:
            raise self.wrong(field, f"a whole number from {at_least} to {at_most}")
        return value

    def number(self, field: str, *, at_least: float = 0.0) -> float:
        """A finite number."""
        value: Any = self.values.get(field)
        if type(value) in (int, float) and at_least <= value <= sys.float_info.max:  # NaN compares false
            return float(value)
        raise self.wrong(field, f"a finite number of at least {at_least:g}")

    def text(self, field: str) -> str:
        """A string."""
        value = self.values.get(field)
        if not isinstance(value, str):
            raise self.wrong(field, "a string")
        return value

    def object(self, field: str) -> "JsonFields":
        """A JSON object."""
        value = self.values.get(field)
        if not isinstance(value, Mapping):
            raise self.wrong(field, "an object")
        return JsonFields(value, self._name_of(field))

    def is_null(self, field: str) -> bool:
        """Whether it is there, and null."""
        return field in self.values and self.values[field] is None

    def only(self, *fields: str) -> None:
        """Refuses any other field."""
        if other := sorted(self.values.keys() - set(fields)):
            raise CheckpointError(
                f"{self.name or 'it'} must have {', '.join(fields)} and no other; it has {shown(other[0])}; {WAY_OUT}"
            )

    def wrong(self, field: str, wanted: str) -> CheckpointError:
        """The error that says what the field should be."""
        given = f"got {shown(self.values[field])}" if field in self.values else "it is missing"
        return CheckpointError(f"{self._name_of(field)} must be {wanted}; {given}; {WAY_OUT}")

    def _name_of(self, field: str) -> str:
        return f"{self.name}.{field}" if self.name else field
