"""Which parameters of an expensive test `make test` runs: few that cover everything once; the rest are slow."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import pytest

__all__ = ["cover", "each_value", "sampled"]

T = TypeVar("T")


def each_value(candidate: tuple[Any, ...]) -> set[Hashable]:
    """Every value of every parameter, with the parameter's name."""
    return {(position, str(value)) for position, value in enumerate(candidate)}


def sampled(candidates: Sequence[tuple[Any, ...]], shows: Callable[[Any], set[Hashable]] = each_value) -> list[Any]:
    """``candidates`` as parameters of a test; those not in their ``cover`` are slow."""
    kept = cover(candidates, shows)
    return [
        pytest.param(*one, id="-".join(map(str, one)), marks=[] if one in kept else [pytest.mark.slow])
        for one in candidates
    ]


def cover(candidates: Sequence[T], shows: Callable[[T], set[Hashable]]) -> list[T]:
    """A greedy cover: candidates that together have every feature that any of them has, each adding the most.

    The first of equals is taken, so the sample is the same on every machine, and a new candidate with a new feature is
    sampled automatically.
    """
    features = [shows(candidate) for candidate in candidates]
    missing, chosen = set().union(*features), set()
    while missing:
        best = max(range(len(features)), key=lambda number: len(features[number] & missing))
        chosen.add(best)
        missing -= features[best]
    return [candidate for number, candidate in enumerate(candidates) if number in chosen]
