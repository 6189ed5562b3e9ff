"""Registers operators defined by formulas over rows for both paths that run such formulas: blocked and compiled."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

from torch import Tensor

from megalith.fusions.core.blocks import by_blocks, widened_by_blocks
from megalith.fusions.core.compiled_blocks import compiled_by_blocks
from megalith.fusions.core.registration import Differentiable, Operator

__all__ = ["RUNNERS", "Runner", "register_row_wise"]

Y = TypeVar("Y")
G = TypeVar("G", bound=tuple[Tensor, ...])


class Runner(NamedTuple):
    """Runs a formula over rows like the functions of the same names in ``core.blocks``."""

    by_blocks: Callable[..., None]
    widened_by_blocks: Callable[..., None]


RUNNERS = {
    "blocked": Runner(by_blocks, widened_by_blocks),
    "compiled": Runner(compiled_by_blocks, compiled_by_blocks),
}


def register_row_wise(
    operator: Operator[Y, G], name: str, forward: Callable[..., Y], backward: Callable[..., G]
) -> tuple[Differentiable[Y, G], Differentiable[Y, G]]:
    """Registers ``megalith::<name>_blocked`` and ``<name>_compiled``; functions take a Runner before the inputs."""
    blocked, compiled = (
        operator.register(f"{name}_{path}", partial(forward, run), partial(backward, run), opaque=True)
        for path, run in RUNNERS.items()
    )
    return blocked, compiled
