"""Small layouts in which every two axes that a run splits over are split together, on at most eight ranks.

An axis is shown with two ranks, and where two are too few to show what it does, with four: a ring of two has one way
round, and a pipeline of two has no stage in the middle.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from math import prod

from megalith.config import RunConfig
from megalith.config.layout import Layout

__all__ = ["AXES", "MOST_RANKS", "Degrees", "cover", "degrees_to_show", "missing_pairs", "name_of", "num_ranks"]

MOST_RANKS = 8
AXES = ("tensor", "context", "pipeline", "replicate", "shard")

# the axes of a layout that are above 1, in the order of AXES
Degrees = Mapping[str, int]


def degrees_to_show(config: RunConfig, layout: Layout) -> dict[str, tuple[int, ...]]:
    """For each axis that ``layout`` splits over, the degrees in which it must be seen."""
    parallel, groups = config.parallel, config.model.num_query_groups
    shown: dict[str, tuple[int, ...]] = {axis: (2,) for axis in AXES if getattr(layout, axis) > 1}
    if 1 < groups < layout.tensor:
        shown["tensor"] = (4,)  # of two ranks that share the groups none has another group than its neighbour
    if layout.context > 1 and parallel.context_method == "two_level":
        shown["context"] = (4,)
    elif layout.context > 2 and parallel.context_method == "ring":
        shown["context"] = (2, 4)
    if layout.pipeline > 2 and parallel.virtual == 1:
        shown["pipeline"] = (2, 4)
    return shown


def cover(shown: Mapping[str, Sequence[int]]) -> list[dict[str, int]]:
    """The fewest layouts that greed finds, at most ``MOST_RANKS`` ranks each, in which every degree of ``shown`` is
    seen, and every two axes together wherever that fits.
    """
    choices = [(1, *shown.get(axis, ())) for axis in AXES]
    candidates = [
        {axis: degree for axis, degree in zip(AXES, row, strict=True) if degree > 1} for row in product(*choices)
    ]
    candidates = [row for row in candidates if num_ranks(row) <= MOST_RANKS]
    missing = set().union(*map(_shows, candidates))
    found: list[dict[str, int]] = []
    while missing:
        # of equals the one of fewest ranks
        best = max(candidates, key=lambda row: (len(_shows(row) & missing), -num_ranks(row)))
        found.append(best)
        missing -= _shows(best)
    return found


def missing_pairs(shown: Mapping[str, Sequence[int]], rows: Sequence[Degrees]) -> list[tuple[str, str]]:
    """The pairs of axes that are above 1 together in none of ``rows``."""
    axes = [axis for axis in AXES if axis in shown]
    return [pair for pair in combinations(axes, 2) if not any(set(pair) <= row.keys() for row in rows)]


def num_ranks(degrees: Degrees) -> int:
    """The ranks of a layout."""
    return prod(degrees.values())


def name_of(degrees: Degrees) -> str:
    """For instance "tensor 2 x pipeline 2"."""
    return " x ".join(f"{axis} {degree}" for axis, degree in degrees.items()) or "one rank"


def _shows(row: Degrees) -> set[object]:
    return {*row.items(), *combinations(row, 2)}
