"""Functions of tensors that are compiled once for any number of rows, called directly, and kept for later runs.

torch.compile determines in every call which of its variants fits, which takes as long as a loop over a megabyte. Here
the answer is remembered for each signature: all that a variant may depend on, such as options, dtypes, sizes and
strides. A new signature is compared with the variants that exist, then with the file of an earlier run, and only then
compiled.
"""

import functools
import hashlib
import logging
import platform
from collections import defaultdict
from collections.abc import Callable, Hashable
from pathlib import Path
from types import CellType, FunctionType, NoneType
from typing import Generic, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

import megalith
from megalith.torch_compat.compiled_ahead import (
    CompiledAhead,
    cache_folder,
    can_compile_ahead,
    compile_ahead,
    load_ahead,
)
from megalith.torch_compat.compiler import compile_apart, compiler_is_watched

__all__ = ["CompiledFormula", "announce_wait"]

R = TypeVar("R")
X = TypeVar("X")

log = logging.getLogger(__name__)

_CONSTANTS = frozenset((NoneType, bool, int, float, str, torch.dtype))
_EVERY = 64  # more dimensions than tensors have
_MOST_SIGNATURES = 2**12  # those of a generation that meets every length


class CompiledFormula(Generic[R]):
    """``function`` of positional arguments, compiled at the first call and called without recording gradients.

    Arguments are tensors, constants, sequences of both, and functions whose closures hold the same. Code fits any
    leading dimensions of the tensors, which count rows, or of heads [S, B, A, D] tokens, sequences and heads; a size of
    1 is compiled by itself. Last dimensions are fixed, and so are tensors in closures and, with ``shares_vectors``, all
    of one dimension: without it these are numbers of each row.
    """

    def __init__(self, function: Callable[..., R], *, shares_vectors: bool = False) -> None:
        self._function = function
        self._shares = 1 if shares_vectors else 0  # up to this many dimensions
        self._by_signature: dict[Hashable, Callable[..., R]] = {}
        self._by_torch: Callable[..., R] | None = None
        self._variants: defaultdict[str, list[CompiledAhead[R]]] = defaultdict(list)

    def __call__(self, *arguments: object) -> R:
        signature = _global_state(), _signature(arguments)
        with torch.no_grad():
            run = self._by_signature.get(signature)
            if run is None:
                if len(self._by_signature) >= _MOST_SIGNATURES:
                    self._by_signature.clear()
                run = self._by_signature[signature] = self._for(arguments)
            return run(*arguments)

    def _for(self, arguments: tuple[object, ...]) -> Callable[..., R]:
        """The code for ``arguments``."""
        if not can_compile_ahead():
            return self._checked
        form = repr((_global_state(), _form(arguments, self._shares)))
        variants = self._variants[form]
        plain = _example(arguments, _EVERY)
        for variant in variants:
            if variant.fits(*plain):
                return variant.run
        path = _folder() / hashlib.sha256(form.encode()).hexdigest()
        found = self._loaded(path, plain) or self._built(path, _example(arguments, self._shares))
        if found is None:
            return self._checked
        variants.append(found)
        return found.run

    def _loaded(self, path: Path, plain: tuple[object, ...]) -> CompiledAhead[R] | None:
        """The variant in ``path``, if there is one that fits; written by a run of the same sources and torch."""
        try:
            variant = load_ahead(path, self._function)
        except FileNotFoundError:
            return None
        except Exception as error:  # an incomplete file, a compiler that is gone
            log.debug("compiling again what %s holds: %s", path, error)
            return None
        return variant if variant.fits(*plain) else None

    def _built(self, path: Path, example: tuple[object, ...]) -> CompiledAhead[R] | None:
        """A new variant, also written to ``path``; None if torch cannot build it ahead of the call."""
        announce_wait()
        try:
            variant = compile_ahead(self._function, example)
        except Exception as error:  # the formula's own errors are raised by the call that follows
            log.debug("compiling %s in each new process: %s", self._function.__qualname__, error)
            return None
        try:
            variant.save(path)
        except Exception as error:  # a folder that cannot be written
            log.debug("%s is not written: %s", path, error)
        return variant

    def _checked(self, *arguments: object) -> R:
        """Through torch.compile, which finds the code for ``arguments`` itself."""
        if self._by_torch is None:
            announce_wait()
            self._by_torch = compile_apart(self._function)
        return self._by_torch(*_example(arguments, self._shares))


def announce_wait() -> None:
    """Logs, once per process, that compiling takes time.

    To be called before something is compiled; nothing is logged inside ``watch_compiler``, whose caller reports it.
    """
    if not compiler_is_watched():
        _tell()


@functools.cache
def _tell() -> None:
    log.warning(
        "compiling fused operations for this CPU on their first calls, a few seconds each; later runs load them "
        "(use('blocked') or TORCH_COMPILE_DISABLE=1 avoids it)"
    )


def _global_state() -> tuple[Hashable, ...]:
    """What an operation of torch depends on besides its arguments, as far as formulas do."""
    return torch.get_default_dtype(), torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


def _signature(x: object) -> Hashable:
    """All that compiled code may depend on, without the values of tensors."""
    kind = type(x)
    if kind in _CONSTANTS:
        return kind, x
    if isinstance(x, tuple | list):
        return tuple([_signature(item) for item in x])
    if isinstance(x, FunctionType):
        return x.__code__, tuple([_signature(cell.cell_contents) for cell in x.__closure__ or ()])
    if isinstance(x, Tensor):  # last, because isinstance takes long to say that something is not
        return x.dtype, x.shape, x.stride()
    raise TypeError(f"compiled formulas take tensors, constants and functions; got {kind.__name__}")


def _form(x: object, shares: int) -> Hashable:
    """What is left of the signature for any number of rows, in values whose repr is the same in every process.

    Tensors of up to ``shares`` dimensions are fixed.
    """
    if isinstance(x, Tensor):
        if x.dim() <= shares:
            return str(x.dtype), tuple(x.shape), x.stride()
        free = _free_dims(x)
        return str(x.dtype), [x.shape[dim] == 1 for dim in free], x.shape[len(free) :], x.is_contiguous(), x.stride(-1)
    if isinstance(x, tuple | list):
        return tuple([_form(item, shares) for item in x])
    if isinstance(x, FunctionType):
        cells = [_form(cell.cell_contents, _EVERY) for cell in x.__closure__ or ()]
        return x.__module__, x.__qualname__, x.__code__.co_firstlineno, tuple(cells)
    return repr(x)


def _example(x: X, shares: int) -> X:
    """``x`` with tensors of the same memory, but separate storages: the compiler would write the whole storage of each.

    They need no gradient. A tensor that occurs twice becomes two, so that code for it fits any two. Those of more than
    ``shares`` dimensions are marked for the compiler: all but their last dimension may change.
    """
    found: object = x
    if isinstance(x, Tensor):
        found = alone = from_dlpack(x.detach())
        if x.dim() > shares:
            for dim in _free_dims(x):
                torch._dynamo.maybe_mark_dynamic(alone, dim)
    elif isinstance(x, tuple | list):
        items = [_example(item, shares) for item in x]
        found = type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    elif isinstance(x, FunctionType) and x.__closure__:
        cells = tuple([CellType(_example(cell.cell_contents, _EVERY)) for cell in x.__closure__])
        found = FunctionType(x.__code__, x.__globals__, x.__name__, x.__defaults__, cells)
    return cast(X, found)


def _free_dims(x: Tensor) -> range:
    """All dimensions but the last, if there are several."""
    return range(max(1, x.dim() - 1))


@functools.cache
def _folder() -> Path:
    """Where the code for these sources, this torch and this CPU is kept."""
    return _folder_of(Path(megalith.__file__).parent)


def _folder_of(package: Path) -> Path:
    given = hashlib.sha256()
    for part in ("fusions", "numerics", "torch_compat"):
        for path in sorted((package / part).glob("**/*.py")):
            given.update(path.read_bytes())
    machine = platform.python_version(), platform.machine(), torch.backends.cpu.get_cpu_capability()
    given.update(repr((torch.__version__, *machine)).encode())
    return cache_folder() / "megalith" / given.hexdigest()[:32]
