"""Chooses the path of a fused operation: its ``backend`` argument, else ``use(...)``, else its family's default.

triton     our kernels, on a GPU (CUDA or ROCm), or on any tensor in Triton's interpreter
compile    through torch.compile: for operations over rows, forward and backward formulas that save what triton saves;
           for others the reference. On a CPU it needs a C++ compiler. Inside an enclosing torch.compile, the
           formulas of the reference, for that compiler to fuse
aten       torch's own operator, for operations that have one with the same numerics
blocked    the reference over blocks of rows that fit in a CPU's cache, forward and backward; saves what triton saves
reference  plain torch: any device, any dtype, twice differentiable

All paths of an operation agree: float32 inside (float64 for float64), one rounding on store. One has a larger error in
the left tail: exact GELU in 16 bits by ``aten`` (``activation.bias_gelu``). ``backend`` is a demand: a path that cannot
run raises an error. ``use`` is a preference: where that path cannot run, the default is taken.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megalith.errors import BackendError
from megalith.fusions.core import preference
from megalith.fusions.core.blocks import LARGEST_WHOLE
from megalith.fusions.core.compiled_reference import compiled
from megalith.fusions.core.compiler import why_no_compiler, why_not_compile
from megalith.fusions.core.devices import is_hopper
from megalith.fusions.core.names import Backend
from megalith.fusions.core.preference import ranking, use
from megalith.optional import has_triton, triton_interprets
from megalith.torch_compat.tensors import forward_mode_is_on

__all__ = ["Backend", "Fusion", "Operand", "chosen_by_use", "compiled", "use", "why_not_forward_mode"]

log = logging.getLogger(__name__)
Path = TypeVar("Path", covariant=True)


class Operand(Protocol):
    """The tensor attributes that the choice of a path depends on."""

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def numel(self) -> int: ...


def chosen_by_use() -> Backend | None:
    """The path set by the innermost ``use(...)`` of this thread or asyncio task."""
    return preference.backend


@dataclass(frozen=True)
class Fusion(Generic[Path]):
    """A fused operation: its name, and one function per path, all with the same signature.

    Attributes:
        limits: by path, a function that returns why the path cannot take an operand that others can; None if it can.
        whole: the path for tensors that fit in one block, where ``defaults`` ranks paths over blocks first. It must
            accept every operand.
        defaults: by device, the paths tried by default, in order; devices not listed take the reference. "hopper" is an
            NVIDIA GPU of that generation, "cuda" if not listed. For a CPU, the order follows the timings of ``python -m
            benchmarks.fusions``, with and without a C++ compiler (each page of docs/fusions ends with the latest
            table); for a GPU, it is our kernels, unless torch's were faster.
        on_hopper: for ``explain``, which calls take another path on a Hopper GPU, if some do.
        backs: the gradient of each path by itself, for Megatron's ``torch.autograd.Function`` classes. It is called
            like the backward of the operator (``core.registration``) and records no gradient.
    """

    name: str
    paths: Mapping[Backend, Path]
    limits: Mapping[Backend, Callable[[Operand], str | None]] = field(default_factory=dict)
    whole: Backend = "reference"
    defaults: Mapping[str, Sequence[Backend]] = field(default_factory=dict)
    backs: Mapping[Backend, Callable[..., tuple[Tensor, ...]]] = field(default_factory=dict)
    on_hopper: str = ""

    def path(self, x: Operand, backend: Backend | None) -> Path:
        """The function that computes the operation on ``x``, for path ``backend`` or else for the result of ``choose``.

        Raises:
            BackendError: the path cannot run on ``x``; the message says why and names those that can.
        """
        chosen = backend or self.choose(x)
        if chosen == "compile" and torch.compiler.is_compiling() and chosen in self.paths:
            return self.paths["reference"]  # the outer compiler can trace a formula, but not a compiled function
        if chosen != self.whole and (reason := self.why_not(chosen, x)):
            able = [path for path in self.paths if path != chosen and not self.why_not(path, x, builds=False)]
            raise BackendError(
                f"{self.name} cannot run with backend={chosen!r}: {reason}; use {' or '.join(able)} instead"
            )
        return self.paths[chosen]

    def choose(self, x: Operand) -> Backend:
        """The path set by ``use(...)`` if ``x`` can take it, else the default."""
        preferred = chosen_by_use()
        return self.default(x) if preferred is None or self.why_not(preferred, x) else preferred

    def choose_for_function(self, x: Operand) -> Backend:
        """The path for both directions of a ``torch.autograd.Function``, which calls ``paths`` and later ``backs``.

        Inside torch.compile it is the reference, whose formulas the compiler can fuse.
        """
        return "reference" if torch.compiler.is_compiling() else self.choose(x)

    def default(self, x: Operand) -> Backend:
        """The first path in ``defaults`` for the device of ``x`` that can run here.

        float64 and forward-mode AD take the reference on every device. Inside torch.compile, so does anything that
        would be compiled or blocked. A tensor that fits in one block takes ``whole``, without waiting for a compiler.
        If ``x`` exceeds the limits of all default paths, the reference is taken and logged once. Under ``prefer`` none
        of this applies. Inside ``without_compiling`` nothing is compiled.
        """
        kind = "hopper" if "hopper" in self.defaults and is_hopper(x.device) else x.device.type
        ranked = self.defaults.get(kind, ("reference",))
        if (given := ranking.preference) is not None:
            order: tuple[Backend, ...] = (*given.backends, *ranked, "reference")
            preferred = next(path for path in order if not self.why_not(path, x))
            given.taken.add((self.name, preferred))
            return preferred
        of_loops = ranked[0] in ("compile", "blocked")
        if x.dtype == torch.float64 or forward_mode_is_on():
            return "reference"
        if of_loops and torch.compiler.is_compiling():
            return "reference"
        if of_loops and x.numel() <= LARGEST_WHOLE:
            return self.whole
        for path in ranked:
            if (path != "compile" or ranking.compiles) and not self.why_not(path, x):
                return path
        fitting = [path for path in ranked if not self._limit(path, x)]
        if fitting:
            return fitting[-1]
        if not torch.compiler.is_compiling():  # torch.compile cannot trace the log call
            _tell(f"{self.name} falls back to its reference in plain torch: {self._limit(ranked[-1], x)}")
        return "reference"

    def why_not(self, backend: Backend, x: Operand, *, builds: bool = True) -> str | None:
        """Why ``x`` cannot take ``backend``, in one clause; None if it can.

        With ``builds``, a test build checks the C++ compiler, which takes seconds if torch's cache is empty.
        """
        if backend not in self.paths:
            return f"it has no such path, only {', '.join(self.paths)}"
        if reason := self._limit(backend, x):
            return reason
        if backend not in ("aten", "reference") and (reason := why_not_forward_mode()):
            return reason
        if backend == "triton":
            return _why_not_triton(x)
        if backend == "compile" and x.device.type == "cpu" and not torch.compiler.is_compiling():
            if isinstance(x, FakeTensor):  # only shapes are computed
                return None
            return why_not_compile() if builds else why_no_compiler()
        return None

    def _limit(self, backend: Backend, x: Operand) -> str | None:
        return self.limits[backend](x) if backend in self.limits else None


def why_not_forward_mode() -> str | None:
    """Why our operators cannot run now, in one clause, if forward-mode AD is active; else None."""
    return "it has no derivative for forward-mode AD" if forward_mode_is_on() else None


@functools.cache
def _tell(line: str) -> None:
    """Logs ``line`` once per process."""
    log.warning(line)


def _why_not_triton(x: Operand) -> str | None:
    if not has_triton():
        return "triton is not installed (pip install 'megalith[triton]')"
    if x.dtype == torch.float64:
        return "its kernels compute in float32, but the input is float64"
    if x.device.type != "cuda" and not triton_interprets():
        return f"the input is on {x.device.type}, and TRITON_INTERPRET=1 was not set when megalith was imported"
    return None
