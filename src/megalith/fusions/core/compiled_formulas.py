"""Functions of tensors that are compiled once for any number of rows, called directly, and kept for later runs.

torch.compile determines in every call which of its variants fits, which takes as long as a loop over a megabyte. Here
the answer is remembered for each signature: all that a variant may depend on, such as options, dtypes, sizes and
strides. A new signature is compared with the variants that exist, including those in files of earlier runs, and only
then compiled.
"""

import functools
import logging
import threading
from collections.abc import Callable, Hashable, Iterator
from types import CellType, CodeType, FunctionType, NoneType
from typing import Generic, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from megalith.fusions.core.kept_code import KeptCode
from megalith.torch_compat.compiled_ahead import CompiledAhead, InductorError, can_compile_ahead, compile_ahead, stance
from megalith.torch_compat.compiler import compile_apart, compiler_is_watched

__all__ = ["CompiledFormula", "announce_wait"]

R = TypeVar("R")
X = TypeVar("X")

log = logging.getLogger(__name__)

_CONSTANTS = frozenset((NoneType, bool, int, str, torch.dtype))
_SEQUENCES = (tuple, list)
_ALL_DIMS = 64  # more than a tensor has
_MOST_SIGNATURES = 2**12  # of one formula in memory: a run may meet any number of lengths
_compiling = threading.RLock()  # torch's settings are those of the process


class CompiledFormula(Generic[R]):
    """``function`` of positional arguments, compiled at the first call and called without recording gradients.

    Arguments are tensors, constants, sequences of both, and functions whose closures hold the same. Code fits any
    leading dimensions of the tensors, which count rows, or of heads [S, B, A, D] tokens, sequences and heads; a size of
    1 is compiled by itself. Last dimensions are fixed, and so are tensors in closures and, with ``shares_vectors``, all
    of one dimension; otherwise a vector holds one number per row.
    """

    def __init__(self, function: Callable[..., R], *, shares_vectors: bool = False) -> None:
        self._function = function
        self._num_shared_dims = 1 if shares_vectors else 0  # tensors of up to so many dimensions are shared by all rows
        self._by_signature: dict[Hashable, Callable[..., R]] = {}
        self._by_torch: Callable[..., R] | None = None
        self._variants: dict[str, list[CompiledAhead[R]] | None] = {}  # by form; None if torch cannot build ahead

    def __call__(self, *arguments: object) -> R:
        if torch.is_grad_enabled():  # never in the forward of a Function, nor in a backward
            with torch.no_grad():
                return self(*arguments)
        signature = _global_state(), _signature(arguments)
        run = self._by_signature.get(signature)
        if run is None:
            with _compiling:
                run = self._code_for(arguments)
            if len(self._by_signature) >= _MOST_SIGNATURES:
                self._by_signature.clear()
            self._by_signature[signature] = run
        return run(*arguments)

    def _code_for(self, arguments: tuple[object, ...]) -> Callable[..., R]:
        on_cpu = all(x.is_cpu and not x.is_neg() for x in _tensors(arguments))
        if not on_cpu or not can_compile_ahead() or stance() != "default":
            return self._through_torch_compile
        form = repr((_form(self._function, 0), _global_state(), _form(arguments, self._num_shared_dims)))
        if form not in self._variants:
            self._variants[form] = KeptCode(form).load(self._function)
        variants = self._variants[form]
        unmarked = _example(arguments, _ALL_DIMS)
        for variant in variants or ():
            if variant.fits(*unmarked):
                return variant.run
        if variants is None or (built := self._built(_example(arguments, self._num_shared_dims))) is None:
            self._variants[form] = None
            return self._through_torch_compile
        KeptCode(form).keep(built)
        variants.append(built)
        return built.run

    def _built(self, marked: tuple[object, ...]) -> CompiledAhead[R] | None:
        """New code; None if torch cannot build it ahead of the call."""
        announce_wait()
        try:
            return compile_ahead(self._function, marked)
        except InductorError:
            raise
        except Exception as error:  # the formula's own errors are raised by the call that follows
            log.debug("compiling %s in each new process: %s", self._function.__qualname__, error)
            return None

    def _through_torch_compile(self, *arguments: object) -> R:
        if self._by_torch is None:
            announce_wait()
            self._by_torch = compile_apart(self._function)
        return self._by_torch(*_example(arguments, self._num_shared_dims))


def announce_wait() -> None:
    """Logs, once per process, that compiling takes time.

    To be called before something is compiled; nothing is logged inside ``watch_compiler``, whose caller reports it.
    """
    if not compiler_is_watched():
        _log_wait()


@functools.cache
def _log_wait() -> None:
    log.warning(
        "compiling fused operations on their first calls, a few seconds each; later runs load most of them "
        "(use('blocked') or TORCH_COMPILE_DISABLE=1 avoids it)"
    )


def _global_state() -> tuple[Hashable, ...]:
    """What an operation of torch on a CPU depends on besides its arguments, as far as formulas do."""
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    return torch.get_default_dtype(), autocast, stance()


def _signature(x: object) -> Hashable:
    """All of an argument that compiled code may depend on."""
    kind = type(x)
    if kind in _CONSTANTS:
        return kind, x
    if kind is float:
        return cast(float, x).hex()  # 0.0 and -0.0 are equal
    if isinstance(x, _SEQUENCES):
        return kind, *[_signature(item) for item in x]
    if isinstance(x, FunctionType):
        if x.__defaults__ or x.__kwdefaults__:
            raise TypeError(f"an argument of a compiled formula has no default values; {x.__qualname__} has")
        return x.__module__, x.__code__, tuple([_signature(cell.cell_contents) for cell in x.__closure__ or ()])
    if isinstance(x, Tensor):  # last, because isinstance takes long to say that something is not
        return x.dtype, x.device, x.is_neg(), x.shape, x.stride()
    raise TypeError(f"compiled formulas take tensors, constants and functions; got {kind.__name__}")


def _form(x: object, num_shared_dims: int) -> Hashable:
    """The signature without the sizes that may vary, in values whose repr is the same in every process."""
    if isinstance(x, Tensor):
        if x.dim() <= num_shared_dims:
            return str(x.dtype), tuple(x.shape), x.stride()
        free = _free_dims(x)
        sizes = [size if size < 2 else None for size in x.shape[: len(free)]]
        return str(x.dtype), sizes, tuple(x.shape[len(free) :]), x.is_contiguous(), x.stride(-1) == 1
    if isinstance(x, _SEQUENCES):
        return type(x).__qualname__, *[_form(item, num_shared_dims) for item in x]
    if isinstance(x, FunctionType):
        cells = [_form(cell.cell_contents, _ALL_DIMS) for cell in x.__closure__ or ()]
        return x.__module__, x.__qualname__, _code(x.__code__), tuple(cells)
    return x.hex() if isinstance(x, float) else repr(x)


def _code(code: CodeType) -> Hashable:
    """What ``code`` does, in values whose repr is the same in every process."""
    return code.co_firstlineno, code.co_code, code.co_names, tuple(map(_constant, code.co_consts))


def _constant(value: object) -> Hashable:
    if isinstance(value, CodeType):
        return _code(value)
    return tuple(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _tensors(x: object) -> Iterator[Tensor]:
    """All tensors in an argument."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, _SEQUENCES):
        yield from (found for item in x for found in _tensors(item))
    elif isinstance(x, FunctionType):
        yield from (found for cell in x.__closure__ or () for found in _tensors(cell.cell_contents))


def _example(x: X, num_shared_dims: int) -> X:
    """``x`` with tensors of the same memory, but separate storages: the compiler would write the whole storage of each.

    They need no gradient. A tensor that occurs twice becomes two, so that the code also fits two different ones. Those
    of more than ``num_shared_dims`` dimensions are marked for the compiler: all but their last dimension may change.
    """
    result: object = x
    if isinstance(x, Tensor):
        result = tensor = from_dlpack(x.detach().resolve_neg())
        if x.dim() > num_shared_dims:
            for dim in _free_dims(x):
                torch._dynamo.maybe_mark_dynamic(tensor, dim)
    elif isinstance(x, _SEQUENCES):
        items = [_example(item, num_shared_dims) for item in x]
        result = type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    elif isinstance(x, FunctionType) and x.__closure__:
        cells = tuple([CellType(_example(cell.cell_contents, _ALL_DIMS)) for cell in x.__closure__])
        result = FunctionType(x.__code__, x.__globals__, x.__name__, None, cells)
    return cast(X, result)


def _free_dims(x: Tensor) -> range:
    """All dimensions but the last, if there are several."""
    return range(max(1, x.dim() - 1))
