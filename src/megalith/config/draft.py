"""A run's settings before they are known to be valid, and the violations that rules report."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isqrt, log
from typing import Any

from megalith.config.layout import Layout
from megalith.errors import TopologyError

__all__ = ["DENSE_DEGREES", "Draft", "Fix", "Unknown", "Violation", "divisors", "nearest_first", "round_up"]

DENSE_DEGREES = ("tensor", "context", "pipeline", "replicate", "shard")

# settings to change, by dotted name; None removes the setting
Fix = Mapping[str, Any]


class Unknown(Exception):  # noqa: N818 (it ends a rule and is not reported)
    """A rule asked for a setting that is missing or malformed, which is reported separately."""


@dataclass(frozen=True)
class Draft:
    """Settings of the right types by dotted name, defaults included; ``given`` names those that are not defaults."""

    values: Mapping[str, Any]
    given: frozenset[str]
    world_size: int | None = None  # ranks; None where it is not known yet

    def __getitem__(self, name: str) -> Any:
        """The value of ``name``; raises Unknown, which ends the rule, if there is none."""
        if (value := self.values.get(name)) is None:
            raise Unknown(name)
        return value

    def get(self, name: str) -> Any:
        """The value of ``name``, or None."""
        return self.values.get(name)

    @property
    def degrees(self) -> dict[str, int]:
        """The degrees of parallelism as set, for ``Layout.resolve``."""
        degrees: dict[str, int] = {name: self[f"parallel.{name}"] for name in (*DENSE_DEGREES, "expert")}
        if (expert_tensor := self.get("parallel.expert_tensor")) is not None:
            degrees["expert_tensor"] = expert_tensor
        return degrees

    @property
    def layout(self) -> Layout:
        """The resolved layout; with a fixed ``shard``, for any world. Raises Unknown if there is none."""
        degrees = self.degrees
        try:
            return Layout.resolve(self.world_size if degrees["shard"] == -1 else None, **degrees)
        except TopologyError:
            raise Unknown("parallel.shard") from None


@dataclass(frozen=True)
class Violation:
    """A setting that must change.

    Attributes:
        rule: the rule that is broken; together with ``name`` it identifies the violation.
        name: the dotted name of the setting at fault.
        message: what was wanted and what was given.
        fixes: possible fixes, best first, none of them tried yet.
    """

    rule: str
    name: str
    message: str
    fixes: tuple[Fix, ...]

    @property
    def key(self) -> tuple[str, str]:
        return self.rule, self.name


def divisors(number: int) -> list[int]:
    """All divisors of a positive ``number``, in order."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def nearest_first(numbers: Iterable[int], target: int) -> Iterator[int]:
    """Yields positive ``numbers`` by ratio to a positive ``target``, nearest first; in a tie, the smaller one first."""
    yield from sorted(set(numbers), key=lambda number: (abs(log(number / target)), number))


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``number``."""
    return -(-number // multiple) * multiple
