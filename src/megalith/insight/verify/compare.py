"""Compares the record of a rank with the record of one process, entry by entry, with ``numerics.tolerance``."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.insight.verify.record import Entry, Key, Record
from megalith.numerics.tolerance import LAYOUT_FLOAT32, LAYOUT_FLOAT64, NOISE_FLOAT32, NOISE_FLOAT64, gradient_error

__all__ = ["BOUNDS", "Errors", "errors", "expected", "first_beyond", "merged"]

Errors = Mapping[Key, float]


class Bound(NamedTuple):
    """The error below which runs count as equal, and the share of the norm of all gradients that counts as rounding."""

    error: float
    noise: float


BOUNDS = {"float64": Bound(LAYOUT_FLOAT64, NOISE_FLOAT64), "float32": Bound(LAYOUT_FLOAT32, NOISE_FLOAT32)}


def errors(found: Record, want: Record, dtype: str) -> dict[Key, float]:
    """The error of each entry of ``found`` that is also in ``want``, which is float64; inf for NaN and other shapes.

    An entry of ``found`` that is not in ``want`` has an infinite error, unless it is a module's, which is ignored.
    """
    squares: dict[object, float] = defaultdict(float)
    for key, entry in want.items():
        squares[_together(key)] += float(entry.values.double().square().sum())
    result: dict[Key, float] = {}
    for key, entry in found.items():
        if key in want:
            result[key] = _error(entry, want[key], math.sqrt(squares[_together(key)]), BOUNDS[dtype].noise)
        elif key.kind != "module":
            result[key] = math.inf
    return result


def merged(of_ranks: Iterable[Errors]) -> dict[Key, float]:
    """The largest error of each entry on any rank."""
    result: dict[Key, float] = {}
    for found in of_ranks:
        for key, error in found.items():
            result[key] = max(error, result.get(key, 0.0))
    return result


def expected(keys: Iterable[Key], dtype: str) -> list[Key]:
    """The entries of the record of one process that some rank must have: all except modules, which may be split.

    In float32 the final weights are excluded: AdamW divides a gradient that is zero except for rounding errors by its
    own magnitude, and moves the weight by a full step. The gradients of the second step depend on the weights after the
    first.
    """
    keys = [key for key in keys if key.kind != "module"]
    last = max(key.step for key in keys)
    return [key for key in keys if dtype == "float64" or key.kind != "weight" or key.step < last]


def first_beyond(found: Errors, keys: Iterable[Key], bound: float) -> Key | None:
    """The first of ``keys`` whose error is not below ``bound``."""
    return next((key for key in keys if key in found and not found[key] < bound), None)


def _together(key: Key) -> object:
    """Entries of one kind share the norm that separates zeros from noise; each module has its own."""
    return key if key.kind == "module" else key[:2]


def _error(found: Entry, want: Entry, norm: float, noise: float) -> float:
    values: Tensor = want.values
    if found.tokens is not None:
        assert want.tokens is not None, "modules have tokens in every record"
        values = values[torch.searchsorted(want.tokens, found.tokens)]
    if found.values.shape != values.shape:
        return math.inf
    # if the reference is all zeros, such as initial biases, use the absolute error
    error = gradient_error(found.values, values, norm, noise) if norm else float(found.values.double().norm())
    return math.inf if math.isnan(error) else error
