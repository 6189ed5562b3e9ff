"""The registry of operations: each family adds its own, and ``explain()``, tests and benchmarks read it."""

from typing import Any, TypeVar

from megalith.fusions.core.dispatch import Fusion

__all__ = ["FUSIONS", "registered"]

Path = TypeVar("Path")

FUSIONS: dict[str, Fusion[Any]] = {}


def registered(fusion: Fusion[Path]) -> Fusion[Path]:
    """Adds ``fusion`` to the registry under its name and returns it; called where a family declares the operation."""
    assert fusion.name not in FUSIONS, f"two operations are named {fusion.name}"
    FUSIONS[fusion.name] = fusion
    return fusion
