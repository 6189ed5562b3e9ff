"""A case: contenders that do the same work, a reference they are checked against, and the problem sizes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

__all__ = ["Case", "Contender", "First", "Runner"]


@dataclass(frozen=True)
class First:
    """The first run: its seconds, including compilation, and how far its result is from the reference."""

    seconds: float
    loss_error: float  # absolute, in nats
    gradient_error: float | None  # of the worst tensor, relative to its norm; None without gradients


class Runner(Protocol):
    """A contender that has been built and has loaded its weights."""

    def first(self) -> First:
        """Does the first run and compares it with the reference."""

    def run(self) -> None:
        """Does one more run."""


@dataclass(frozen=True)
class Contender:
    """``build(size, folder)`` creates the runner in its own process; ``folder`` holds what ``Case.prepare`` wrote."""

    build: Callable[[Any, Path], Runner]
    matmuls: str  # the dtype of most of its FLOPs, whose GEMM rate bounds it
    gradient_tolerance: float = 0.0


@dataclass(frozen=True)
class Case:
    """``tokens`` and ``flops`` give the work of one run at a size; ``sizes`` has "full" and "quick"."""

    title: str
    base: str  # the contender that speed-ups are relative to
    contenders: Mapping[str, Contender]
    sizes: Mapping[str, Any]
    prepare: Callable[[Any, Path], None]
    tokens: Callable[[Any], int]
    flops: Callable[[Any], int]
    loss_tolerance: float = 1e-3

    def verdict(self, name: str, first: First) -> str | None:
        """What is wrong with the first run of contender ``name``, or None."""
        tolerance, error = self.contenders[name].gradient_tolerance, first.gradient_error
        # "not <=", so that NaN fails
        if not first.loss_error <= self.loss_tolerance:
            return f"wrong: its loss is {first.loss_error:.1e} from the reference, over {self.loss_tolerance:.0e}"
        if error is not None and not error <= tolerance:
            return f"wrong: a gradient is {error:.1e} from the reference, over {tolerance:.0e}"
        return None
