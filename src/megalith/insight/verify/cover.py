"""Chooses layouts of at most eight ranks that together cover every pair of axes that a run splits over.

An axis is shown with two ranks, or with four if two cannot show what it does: a ring of two has only one direction, and
a pipeline of two has no intermediate stage. The expert axes add no ranks: they are folded over tensor, context,
replicate and shard.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from math import prod

from megalith.config import RunConfig
from megalith.config.layout import Layout

__all__ = [
    "AXES",
    "FOLDED",
    "MOST_RANKS",
    "Degrees",
    "axes_of",
    "cover",
    "degrees_to_show",
    "is_layout",
    "missing_pairs",
    "name_of",
    "num_ranks",
]

MOST_RANKS = 8
FOLDED = ("expert", "expert_tensor")
AXES = ("tensor", "context", "pipeline", "replicate", "shard", *FOLDED)

# the degrees of a layout that are above 1, in the order of AXES
Degrees = Mapping[str, int]


def axes_of(config: RunConfig, layout: Layout) -> dict[str, int]:
    """The degrees of ``layout`` that are above 1; expert axes only for models with experts."""
    axes = AXES if config.model.moe is not None else [axis for axis in AXES if axis not in FOLDED]
    return {axis: getattr(layout, axis) for axis in axes if getattr(layout, axis) > 1}


def degrees_to_show(config: RunConfig, layout: Layout) -> dict[str, tuple[int, ...]]:
    """For each axis that ``layout`` splits over, the degrees that must be covered."""
    parallel, groups = config.parallel, config.model.num_query_groups
    shown: dict[str, tuple[int, ...]] = dict.fromkeys(axes_of(config, layout), (2,))
    if 1 < groups < layout.tensor:
        shown["tensor"] = (4,)  # two ranks cannot show several groups that are each shared
    if layout.context > 1 and parallel.context_method == "two_level":
        shown["context"] = (4,)
    elif layout.context > 2 and parallel.context_method == "ring":
        shown["context"] = (2, 4)
    if layout.pipeline > 2 and parallel.virtual == 1:
        shown["pipeline"] = (2, 4)
    if shown.get("tensor") == shown.get("context") == (4,):
        shown["tensor"] = (2, 4)  # with context 4 only tensor 2 fits
    beneath = [axis for axis in shown if axis not in ("pipeline", *FOLDED)]
    if shown.keys() >= set(FOLDED) and len(beneath) == 1:
        shown[beneath[0]] = (4,)  # enough ranks for both expert axes
    return shown


def cover(shown: Mapping[str, Sequence[int]]) -> list[dict[str, int]]:
    """Greedily chooses few layouts of at most ``MOST_RANKS`` ranks that cover ``shown``.

    They contain every degree of ``shown``, and every pair of axes that fits.
    """
    choices = [(1, *shown.get(axis, ())) for axis in AXES]
    candidates = [
        {axis: degree for axis, degree in zip(AXES, row, strict=True) if degree > 1} for row in product(*choices)
    ]
    candidates = [row for row in candidates if is_layout(row)]
    missing = set().union(*map(_shows, candidates))
    found: list[dict[str, int]] = []
    while missing:
        # ties: fewest ranks
        best = max(candidates, key=lambda row: (len(_shows(row) & missing), -num_ranks(row)))
        found.append(best)
        missing -= _shows(best)
    return found


def missing_pairs(shown: Mapping[str, Sequence[int]], rows: Sequence[Degrees]) -> list[tuple[str, str]]:
    """The pairs of axes that no layout of ``rows`` combines."""
    axes = [axis for axis in AXES if axis in shown]
    return [pair for pair in combinations(axes, 2) if not any(set(pair) <= row.keys() for row in rows)]


def num_ranks(degrees: Degrees) -> int:
    """The number of ranks of a layout."""
    return prod(degree for axis, degree in degrees.items() if axis not in FOLDED)


def is_layout(degrees: Degrees) -> bool:
    """Whether the layout fits on ``MOST_RANKS``, and the ranks of a pipeline stage can share the experts."""
    size = num_ranks(degrees)
    experts = prod(degrees.get(axis, 1) for axis in FOLDED)
    return size <= MOST_RANKS and size // degrees.get("pipeline", 1) % experts == 0


def name_of(degrees: Degrees) -> str:
    """The layout in words, such as "tensor 2 x pipeline 2"."""
    return " x ".join(f"{axis} {degree}" for axis, degree in degrees.items()) or "one rank"


def _shows(row: Degrees) -> set[object]:
    return {*row.items(), *combinations(row, 2)}
