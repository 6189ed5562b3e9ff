"""Chooses the path of a fused operation: its ``backend`` argument, else ``use(...)``, else the committed table.

triton     our kernels, on a GPU (CUDA or ROCm), or on any tensor in Triton's interpreter
compile    through torch.compile: formulas over rows, forward and backward, that keep what triton keeps; else the
           reference. On a CPU it needs a C++ compiler
aten       torch's own operator, for operations that have one with the same numerics
blocked    the reference over blocks of rows that stay in a CPU's cache, forward and backward; keeps what triton keeps
reference  plain torch: any device, any dtype, differentiable twice

All paths of an operation agree: float32 inside (float64 for float64), one rounding on store. A path that was asked for
and cannot run is an error; no path ever stands in for another.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, ParamSpec, Protocol, TypeVar, get_args

import torch
from torch._subclasses.fake_tensor import FakeTensor

from megalith.errors import BackendError
from megalith.fusions.paths.blocks import LARGEST_WHOLE
from megalith.fusions.paths.compiler import why_not_compile
from megalith.fusions.paths.default_paths import DEFAULT_PATHS
from megalith.fusions.paths.names import Backend
from megalith.optional import has_triton, triton_interprets
from megalith.torch_compat import keeping_what_is_saved

__all__ = ["Backend", "Fusion", "Operand", "chosen_by_use", "compiled", "prefer", "use"]

Path = TypeVar("Path", covariant=True)
P = ParamSpec("P")
R = TypeVar("R")


class Operand(Protocol):
    """All of a tensor that the choice of a path looks at."""

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def numel(self) -> int: ...


class _Choice:
    """What ``use`` and ``prefer`` have set, process-wide: torch.compile guards attributes, and traces no ContextVar."""

    backend: Backend | None = None
    preferred: tuple[Backend, ...] | None = None
    taken: set[tuple[str, Backend]]


_choice = _Choice()


@contextmanager
def use(backend: Backend) -> Iterator[None]:
    """Fused operations called inside take ``backend``; their backward follows them, wherever it runs."""
    if backend not in get_args(Backend):
        raise BackendError(f"backend must be one of {', '.join(get_args(Backend))}; got {backend!r}")
    outer, _choice.backend = _choice.backend, backend
    try:
        yield
    finally:
        _choice.backend = outer


@contextmanager
def prefer(*backends: Backend) -> Iterator[set[tuple[str, Backend]]]:
    """Fused operations called inside choose without regard to the size and the dtype of their tensors.

    Each takes the first of ``backends`` that it can, then the first of the committed table. Gives the pairs of an
    operation's name and the path that it has taken. An explicit ``backend``, or ``use``, still decides first.
    """
    outer, taken = _choice.preferred, set[tuple[str, Backend]]()
    _choice.preferred, _choice.taken = backends, taken
    try:
        yield taken
    finally:
        _choice.preferred = outer


def chosen_by_use() -> Backend | None:
    """The path that the innermost ``use(...)`` has set."""
    return _choice.backend


@dataclass(frozen=True)
class Fusion(Generic[Path]):
    """A fused operation: its name, and a function of one signature for each path that it has.

    ``limits`` says of a path why it cannot take an operand that others can; None if it can.
    """

    name: str
    paths: Mapping[Backend, Path]
    limits: Mapping[Backend, Callable[[Operand], str | None]] = field(default_factory=dict)

    def path(self, x: Operand, backend: Backend | None) -> Path:
        """The function that computes the operation on ``x``, of those the caller may choose.

        Raises:
            BackendError: the path chosen cannot run on ``x``; the message says why and names those that can.
        """
        chosen = backend or _choice.backend or self.default(x)
        if chosen == "compile" and torch.compiler.is_compiling() and chosen in self.paths:
            return self.paths["reference"]  # its compiler sees through a formula, not through what is compiled
        if reason := self.why_not(chosen, x):
            able = [path for path in self.paths if not self.why_not(path, x)]
            raise BackendError(
                f"{self.name} cannot take backend={chosen!r}: {reason}; here it can take {' or '.join(able)}"
            )
        return self.paths[chosen]

    def default(self, x: Operand) -> Backend:
        """The first path that can run here, of those in the committed table for the device of ``x``.

        float64 takes the reference on every device. So does, inside of torch.compile, what would be compiled or
        blocked, and what is one block: there is nothing to cut, and nothing to wait for a compiler for. ``prefer``
        lifts all of that.
        """
        ranked = DEFAULT_PATHS[self.name].get(x.device.type, ("reference",))
        if _choice.preferred is not None:
            order: tuple[Backend, ...] = (*_choice.preferred, *ranked, "reference")
            preferred = next(path for path in order if not self.why_not(path, x))
            _choice.taken.add((self.name, preferred))
            return preferred
        of_loops = ranked[0] in ("compile", "blocked")
        if x.dtype == torch.float64 or (of_loops and (torch.compiler.is_compiling() or x.numel() <= LARGEST_WHOLE)):
            return "reference"
        return next((path for path in ranked if not self.why_not(path, x)), ranked[-1])

    def why_not(self, backend: Backend, x: Operand) -> str | None:
        """Why ``x`` cannot take ``backend``, in one clause; None if it can."""
        if backend not in self.paths:
            return f"it has no such path, only {', '.join(self.paths)}"
        if backend in self.limits and (reason := self.limits[backend](x)):
            return reason
        if backend == "triton":
            return _why_not_triton(x)
        if backend == "compile" and x.device.type == "cpu" and not torch.compiler.is_compiling():
            return None if isinstance(x, FakeTensor) else why_not_compile()  # only its shape is asked for
        return None


def compiled(reference: Callable[P, R]) -> Callable[P, R]:
    """``reference`` through torch.compile, built at the first call; its backward can run twice."""

    @functools.cache
    def build() -> Callable[P, R]:
        return torch.compile(reference, dynamic=True)

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with keeping_what_is_saved():
            return build()(*args, **kwargs)

    return run


def _why_not_triton(x: Operand) -> str | None:
    if not has_triton():
        return "triton is not installed (pip install 'megalith[triton]')"
    if x.dtype == torch.float64:
        return "kernels compute in float32, and the input is float64"
    if x.device.type != "cuda" and not triton_interprets():
        return f"the input is on {x.device.type}, and TRITON_INTERPRET=1 was not set when megalith was imported"
    return None
