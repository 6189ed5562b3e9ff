"""Validates values from untrusted JSON files, field by field and by type."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megalith.errors import CheckpointError

__all__ = ["MOST_COUNTED", "WAY_OUT", "JsonFields", "float_sized", "shown"]

WAY_OUT = "use an older checkpoint, or copy this one again from its source"

# above any count of a run, and small enough that sample number times tokens per sample fits int64
MOST_COUNTED = 10**14
_SHOWN = 100  # characters of a value that a message shows


def shown(value: Any) -> str:
    """Returns ``value`` as JSON, truncated if long."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return "something nested too deeply"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def float_sized(digits: str) -> int:
    """Parses a JSON integer, as ``parse_int`` of ``json.loads``. Raises ValueError if it is too large for a float."""
    number = int(digits)
    if abs(number) > sys.float_info.max:
        raise ValueError(f"integer of {len(digits)} digits is too large")
    return number


@dataclass(frozen=True)
class JsonFields:
    """The JSON object ``values``, found in its file under the dotted ``name``; an empty name is the file itself.

    Every method raises CheckpointError with the field's dotted name, what was expected and what was found.
    """

    values: Mapping[str, Any]
    name: str = ""

    def count(self, field: str, *, at_least: int = 0, at_most: int = MOST_COUNTED) -> int:
        """Returns an integer; ``true`` and ``2.0`` are rejected."""
        value = self.values.get(field)
        if type(value) is not int or not at_least <= value <= at_most:
            raise self.wrong(field, f"an integer from {at_least} to {at_most}")
        return value

    def number(self, field: str, *, at_least: float = 0.0) -> float:
        """Returns a finite number."""
        value: Any = self.values.get(field)
        if type(value) in (int, float) and at_least <= value <= sys.float_info.max:  # NaN compares false
            return float(value)
        raise self.wrong(field, f"a finite number of at least {at_least:g}")

    def text(self, field: str) -> str:
        """Returns a string."""
        value = self.values.get(field)
        if not isinstance(value, str):
            raise self.wrong(field, "a string")
        return value

    def object(self, field: str) -> "JsonFields":
        """Returns a JSON object."""
        value = self.values.get(field)
        if not isinstance(value, Mapping):
            raise self.wrong(field, "an object")
        return JsonFields(value, self._name_of(field))

    def is_null(self, field: str) -> bool:
        """Whether the field is present and null."""
        return field in self.values and self.values[field] is None

    def only(self, *fields: str) -> None:
        """Raises CheckpointError if there are other fields."""
        if other := sorted(self.values.keys() - set(fields)):
            raise CheckpointError(
                f"{self.name or 'it'} must have only the fields {', '.join(fields)}; got {shown(other[0])}; {WAY_OUT}"
            )

    def wrong(self, field: str, wanted: str) -> CheckpointError:
        """Returns the error that says what the field should be."""
        given = f"got {shown(self.values[field])}" if field in self.values else "it is missing"
        return CheckpointError(f"{self._name_of(field)} must be {wanted}; {given}; {WAY_OUT}")

    def _name_of(self, field: str) -> str:
        return f"{self.name}.{field}" if self.name else field
