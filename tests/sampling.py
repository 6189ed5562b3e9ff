"""Which parameters of an expensive test `make test` runs: the fewest that show everything once; the rest is slow."""

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

__all__ = ["cover"]

T = TypeVar("T")


def cover(candidates: Sequence[T], shows: Callable[[T], set[Hashable]]) -> list[T]:
    """Candidates that together show all that any of them shows: again and again the one that adds most.

    The first of equals is taken, so the sample is the same everywhere, and a candidate that shows something new brings
    its own sample with it.
    """
    features = [shows(candidate) for candidate in candidates]
    missing, chosen = set().union(*features), set()
    while missing:
        best = max(range(len(features)), key=lambda number: len(features[number] & missing))
        chosen.add(best)
        missing -= features[best]
    return [candidate for number, candidate in enumerate(candidates) if number in chosen]
