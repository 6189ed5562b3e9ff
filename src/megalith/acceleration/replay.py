"""A function of tensors whose calls of torch are recorded, and then made again without the Python around them.

For what is called over and over on few numbers, as a model is on one new token of each text: a layer's Python takes
longer there than its kernels. A CUDA graph does the same for launches; this one knows no device, keeps no memory, and
calls again as a whole what is ``called_whole``, for instance a cache that has grown since.

A recording is trusted once the next one, of other values, is the same call for call: the same functions in the same
order, the same numbers, flags and weights, the same tensors from one to the next. Where a value is read, the function
is called as it is. What two recordings cannot show is for the caller to rule out: a branch taken from some later length
or count on, a context entered inside, a number generator seeded there.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import wraps
from keyword import iskeyword
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Replayed", "called_whole"]

P = ParamSpec("P")
R = TypeVar("R")

# what says something of a tensor without reading its values; attributes come as `__get__`
_METADATA = frozenset(
    {"__get__", "__len__", "_is_view", "dim", "element_size", "is_contiguous", "is_floating_point", "numel", "size"}
    | {"storage_offset", "stride"}
)
_MAY_RETURN_THEIR_INPUT = frozenset({"contiguous", "float", "to"})  # where it is already what is asked for
# the same memory each time, whatever has been written there meanwhile; items, where they are asked for by places
_VIEWS = frozenset(
    {"__getitem__", "chunk", "expand", "narrow", "permute", "select", "t", "transpose", "unbind", "unsqueeze", "view"}
)
_FRESH = frozenset({"empty", "new_empty"})
_SHAPE_ANEW = frozenset(
    {"__set__", "as_strided_", "resize_", "resize_as_", "set_", "squeeze_", "swapaxes_", "swapdims_", "t_"}
    | {"transpose_", "unsqueeze_"}
)


def called_whole(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, which a recording does not look into: it is called again with all that it does.

    For what depends on lengths, or on objects that change between calls. Its arguments are those of the recording: the
    same objects, and tensors where the recording had tensors. It returns tensors, or sequences of them.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        recording = _current.get()
        if recording is None or recording.is_in_whole_call:
            return function(*args, **kwargs)
        result: R = recording.call_whole(function, args, kwargs)
        return result

    return call


class Replayed:
    """``function``, whose Python runs twice, and once for each call with inputs of another shape, dtype or stride.

    It may call nothing but torch, and what is ``called_whole``, on tensors of one process, and record no gradient:
    kernels that are launched by hand, collectives and hooks are not seen, and would not be called again. Weights and
    other tensors that it holds may change in place.

    Args:
        function: of tensors alone, returning a tensor.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self._function = function
        self._before: _Recording | None = None
        self._layouts: list[tuple[torch.Size, torch.dtype, tuple[int, ...]]] = []
        self._program: Callable[..., Tensor] | None = None
        self._gives_up = False

    def __call__(self, *inputs: Tensor) -> Tensor:
        """What ``function`` gives for ``inputs``."""
        layouts = [(x.shape, x.dtype, x.stride()) for x in inputs]
        if self._program is not None and layouts == self._layouts:
            return self._program(*inputs)
        if self._gives_up or self._program is not None:
            return self._function(*inputs)
        inputs = tuple(
            x.detach() for x in inputs
        )  # objects of their own, also where one is given twice, or is a weight
        recording, before = _Recording(inputs), self._before
        output = recording.of(self._function, inputs)
        if recording.reads_values:
            self._gives_up, self._before = True, None
        elif before is None or layouts != self._layouts:
            self._before, self._layouts = recording, layouts
        else:  # what has differed once may do so again
            self._gives_up = not recording.equals(before)
            self._program, self._before = None if self._gives_up else recording.program(), None
        return output


class _Made(NamedTuple):
    """The tensor that has this number: the inputs come first, then results in their order."""

    number: int


class _Call(NamedTuple):
    """A call, in whose arguments and result tensors are ``_Made`` but for those from outside."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    is_whole: bool = False


class _Recording(TorchFunctionMode):
    """While it is entered, writes down each call of torch that gives or changes a tensor.

    Attributes:
        reads_values: whether the calls may depend on values of tensors, which another call has others of.
        is_in_whole_call: whether what is called now is part of a call that has been written down.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.num_inputs = len(inputs)
        self.calls: list[_Call] = []
        self.reads_values = self.is_in_whole_call = False
        self._made = list(inputs)  # held, or another tensor could get the identity of one
        self._numbers = {id(x): number for number, x in enumerate(inputs)}

    def of(self, function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Tensor:
        """What ``function`` gives for ``inputs``, recorded."""
        before = _current.set(self)
        try:
            with self:
                output = function(*inputs)
        finally:
            _current.reset(before)
        self.calls.append(_Call(_identity, (self._template(output),), {}, None))
        self._made = []
        return output

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if self.is_in_whole_call:
            return function(*args, **kwargs)
        given, named = self._template(tuple(args)), self._template(kwargs)
        with _ReadValues() as read:
            result = function(*args, **kwargs)
        # tensor_split reads where to split, and calls no operator that would tell
        self.reads_values = self.reads_values or read.any or (name == "tensor_split" and _has_tensor(args[1:]))
        if name in _MAY_RETURN_THEIR_INPUT and args and result is args[0]:
            return result
        if _is_of_tensors(result) or (result is None and name not in _METADATA):
            self._append(function, given, named, result)
        elif name not in _METADATA and _has_tensor((*args, *kwargs.values())):
            self.reads_values = True
        return result

    def call_whole(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``function`` gives for its arguments, recorded as one call."""
        given, named = self._template(args), self._template(kwargs)
        self.is_in_whole_call = True
        try:
            result = function(*args, **kwargs)
        finally:
            self.is_in_whole_call = False
        self.reads_values = self.reads_values or not (result is None or _is_of_tensors(result))
        self._append(function, given, named, result, is_whole=True)
        return result

    def equals(self, other: "_Recording") -> bool:
        """Whether a replay of the one is one of the other."""
        if len(self.calls) != len(other.calls):
            return False
        return all(
            a.function == b.function and _same(a[1:], b[1:]) for a, b in zip(self.calls, other.calls, strict=True)
        )

    def program(self) -> Callable[..., Tensor]:
        """The calls as one function of the inputs."""
        names: dict[str, Any] = {}
        lines = [f"def replay({', '.join(f'v{number}' for number in range(self.num_inputs))}):"]
        calls = _those_that_are_read(_without_repeated_views(self.calls))
        for place, call in enumerate(calls[:-1]):
            names[f"f{place}"] = call.function
            given = [_source(x, names) for x in call.args]
            given += [
                f"**{{{name!r}: {_source(x, names)}}}" if iskeyword(name) else f"{name}={_source(x, names)}"
                for name, x in call.kwargs.items()
            ]
            lines.append(f"    {_target(call.result)} = f{place}({', '.join(given)})")
        lines.append(f"    return {_source(calls[-1].args[0], names)}")
        exec(compile("\n".join(lines), "<replay>", "exec"), names)
        # it holds ``names``, and in them it would be a circle, freed whenever Python looks for one
        function: Callable[..., Tensor] = names.pop("replay")
        return function

    def _append(
        self, function: Callable[..., Any], given: Any, named: Any, result: Any, *, is_whole: bool = False
    ) -> None:
        self._number_all(result)
        self.calls.append(_Call(function, given, named, self._template(result), is_whole))

    def _number_all(self, result: Any) -> None:
        if isinstance(result, Tensor):
            if id(result) not in self._numbers:
                self._numbers[id(result)] = len(self._made)
                self._made.append(result)
        elif isinstance(result, (tuple, list)):
            for part in result:
                self._number_all(part)

    def _template(self, value: Any) -> Any:
        """``value`` with ``_Made`` for tensors that have a number."""
        if isinstance(value, Tensor):
            return _Made(self._numbers[id(value)]) if id(value) in self._numbers else value
        if type(value) is dict:
            return {name: self._template(part) for name, part in value.items()}
        if type(value) is list:
            return [self._template(part) for part in value]
        if type(value) is tuple or type(value).__module__ == "torch.return_types":
            return tuple(self._template(part) for part in value)
        return value  # a record that has tensors is the same for two calls, or another one


class _ReadValues(TorchDispatchMode):
    """Whether an operator that is called here gives values to Python, or as many elements as values say."""

    def __init__(self) -> None:
        super().__init__()
        self.any = False

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if operator is torch.ops.aten.index.Tensor:  # whose tag says so for places, too
            self.any = self.any or any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
        elif {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(operator.tags):
            self.any = True
        return operator(*args, **(kwargs or {}))


_current: ContextVar[_Recording | None] = ContextVar("current recording", default=None)


def _identity(x: Tensor) -> Tensor:
    return x


def _without_repeated_views(calls: list[_Call]) -> list[_Call]:
    """``calls``, in which a view of the same numbers of the same tensor is taken once: each layer takes its own."""
    if any(_name(call) in _SHAPE_ANEW for call in calls):
        return calls
    kept: list[_Call] = []
    first_names: dict[int, int] = {}
    views = defaultdict[tuple[Any, int], list[_Call]](list)  # by the function and the tensor
    for call in calls:
        args, kwargs = _renamed(call.args, first_names), _renamed(call.kwargs, first_names)
        call = call._replace(args=args, kwargs=kwargs)
        if _name(call) in _VIEWS and args and isinstance(args[0], _Made | Tensor) and _is_by_places(args[1:]):
            known = views[call.function, args[0].number if isinstance(args[0], _Made) else id(args[0])]
            same = next((view for view in known if _same((view.args, view.kwargs), (args, kwargs))), None)
            if same is not None:
                first_names |= dict(zip(_numbers_in(call.result), _numbers_in(same.result), strict=True))
                continue
            known.append(call)
        kept.append(call)
    return kept


def _those_that_are_read(calls: list[_Call]) -> list[_Call]:
    """``calls`` without views and fresh memory that no later one names."""
    kept: list[_Call] = []
    read: set[int] = set()
    for call in reversed(calls):
        if _name(call) in _VIEWS | _FRESH and read.isdisjoint(_numbers_in(call.result)):
            continue
        read.update(_numbers_in((call.args, call.kwargs)))
        kept.append(call)
    return kept[::-1]


def _name(call: _Call) -> str:
    """Of torch's function; none of one that is called whole, and does what it likes."""
    return "" if call.is_whole else getattr(call.function, "__name__", "")


def _is_by_places(index: Any) -> bool:
    """Whether ``index`` is of numbers, slices and dtypes: a tensor, a list, an array or a bool would make a copy."""
    if type(index) in (tuple, torch.Size):
        return all(map(_is_by_places, index))
    return index is None or index is ... or type(index) in (int, slice, torch.dtype)


def _renamed(template: Any, names: dict[int, int]) -> Any:
    """``template`` with ``names`` for the numbers that have another one."""
    if isinstance(template, _Made):
        return _Made(names.get(template.number, template.number))
    if not _has_number(template):
        return template
    if isinstance(template, dict):
        return {name: _renamed(part, names) for name, part in template.items()}
    parts = [_renamed(part, names) for part in template]
    return tuple(parts) if isinstance(template, tuple) else parts


def _numbers_in(template: Any) -> Iterator[int]:
    if isinstance(template, _Made):
        yield template.number
    elif isinstance(template, (tuple, list, dict)):
        for part in template.values() if isinstance(template, dict) else template:
            yield from _numbers_in(part)


def _has_number(template: Any) -> bool:
    return next(_numbers_in(template), None) is not None


def _has_tensor(value: Any) -> bool:
    """Whether ``value`` is a tensor, or a sequence with one in it."""
    return isinstance(value, Tensor) or (isinstance(value, (tuple, list)) and any(map(_has_tensor, value)))


def _is_of_tensors(result: Any) -> bool:
    """Whether ``result`` is a tensor, or a sequence of tensors, or of None, and tells Python nothing else."""
    if isinstance(result, (tuple, list)) and not isinstance(result, torch.Size):
        return all(part is None or _is_of_tensors(part) for part in result)
    return isinstance(result, Tensor)


def _same(a: Any, b: Any) -> bool:
    """Whether two templates are the same tensor, object or number."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) is dict:
        return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
    if type(a) is slice:
        return _same((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    if type(a) in (tuple, list, torch.Size, _Made):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return isinstance(a, (int, float, complex, str, torch.device)) and bool(a == b)


def _source(template: Any, names: dict[str, Any]) -> str:
    """An expression for ``template``; what has no number is put into ``names``."""
    if isinstance(template, _Made):
        return f"v{template.number}"
    if _has_number(template):
        if isinstance(template, dict):
            return "{" + ", ".join(f"{name!r}: {_source(part, names)}" for name, part in template.items()) + "}"
        parts = "".join(f"{_source(part, names)}, " for part in template)
        return f"({parts})" if isinstance(template, tuple) else f"[{parts}]"
    name = f"c{len(names)}"
    names[name] = template
    return name


def _target(result: Any) -> str:
    """What a result is assigned to: the tensors that later calls name."""
    if isinstance(result, _Made):
        return f"v{result.number}"
    if isinstance(result, (tuple, list)):
        return "(" + "".join(f"{_target(part)}, " for part in result) + ")"
    return "_"
