"""One mistake in a run's settings, and the expected report."""

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Mistake"]


@dataclass(frozen=True)
class Mistake:
    """Changes to VALID (None removes a setting), and a pattern for the first line of the report."""

    changes: dict[str, Any]
    message: str
    world_size: int | None = None
    also: int = field(default=0)  # number of further violations that it causes

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in self.changes.items()) + f"@{self.world_size}"
