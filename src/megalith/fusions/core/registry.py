"""The operations there are: each family adds its own, and ``explain()``, tests and benchmarks read them."""

from typing import Any, TypeVar

from megalith.fusions.core.dispatch import Fusion

__all__ = ["FUSIONS", "registered"]

Path = TypeVar("Path")

FUSIONS: dict[str, Fusion[Any]] = {}


def registered(fusion: Fusion[Path]) -> Fusion[Path]:
    """``fusion``, listed under its name; a family calls it where it declares the operation."""
    assert fusion.name not in FUSIONS, f"two operations are named {fusion.name}"
    FUSIONS[fusion.name] = fusion
    return fusion
