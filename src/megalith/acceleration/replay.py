"""A function of tensors whose calls of torch are recorded, and then made again without the Python around them.

For what is called over and over on few numbers, as a model is on one new token of each text: a layer's Python takes
longer there than its kernels. A CUDA graph does the same for launches; this one knows no device, keeps no memory, and
calls again as a whole what is ``called_whole``, for instance a cache that has grown since.

A recording is trusted once a second one, of other values, is the same call for call: the same functions in the same
order, the same numbers, flags and weights, the same tensors from one to the next. Where they differ, or a value is
read, the function is called as it is. What two recordings cannot show is for the caller to rule out: a branch taken
from some later length or count on, a context entered inside, a number generator seeded there.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

__all__ = ["Replayed", "called_whole"]

P = ParamSpec("P")
R = TypeVar("R")

# what tells of a tensor without reading its values; attributes come as `__get__`
_OF_METADATA = frozenset(
    {"__get__", "__len__", "_is_view", "dim", "element_size", "is_contiguous", "is_floating_point", "numel", "size"}
    | {"storage_offset", "stride"}
)
_GIVE_THEIR_INPUT = frozenset({"contiguous", "float", "to"})  # where it is already what is asked for
# the shape of what they give is read off by Python
_SHAPED_BY_VALUES = frozenset(
    {"argwhere", "bincount", "combinations", "masked_select", "nonzero", "repeat_interleave", "tensor_split", "unique"}
    | {"one_hot", "unique_consecutive", "where"}
)


def called_whole(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, which a recording does not look into: it is called again with all that it does.

    For what depends on lengths, or on objects that change between calls. Its arguments are those of the recording: the
    same objects, and tensors where the recording had tensors.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if has_torch_function(args):
            result: R = handle_torch_function(function, args, *args, **kwargs)
            return result
        return function(*args, **kwargs)

    return call


class Replayed:
    """``function``, whose Python runs twice, and once for each call with inputs of other shapes.

    It may call nothing but torch, and what is ``called_whole``, on tensors of one process, and record no gradient:
    kernels that are launched by hand, collectives and hooks are not seen, and would not be called again. Weights and
    other tensors that it holds may change in place.

    Args:
        function: of tensors alone, returning a tensor.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self._function = function
        self._before: _Recording | None = None
        self._shapes: list[torch.Size] = []
        self._program: Callable[..., Tensor] | None = None
        self._gives_up = False

    @property
    def replays(self) -> bool:
        """Whether Python is left out from the next call on."""
        return self._program is not None

    def __call__(self, *inputs: Tensor) -> Tensor:
        """What ``function`` gives for ``inputs``."""
        shapes = [x.shape for x in inputs]
        if self._program is not None and shapes == self._shapes:
            return self._program(*inputs)
        if self._gives_up or self._program is not None:
            return self._function(*inputs)
        recording = _Recording(inputs)
        with recording:
            output = self._function(*inputs)
        recording.end(output)
        if recording.reads_values:
            self._gives_up, self._before = True, None
        elif self._before is None or shapes != self._shapes:
            self._before, self._shapes = recording, shapes
        else:
            self._gives_up = not recording.equals(self._before)
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


class _Recording(TorchFunctionMode):
    """While it is entered, writes down each call of torch that gives or changes a tensor."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.num_inputs = len(inputs)
        self.calls: list[_Call] = []
        self.reads_values = False
        self._made = list(inputs)  # held, or another tensor could get the identity of one
        self._numbers = {id(x): number for number, x in enumerate(inputs)}

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = tuple(self._template(x) for x in args)
        named = {name: self._template(x) for name, x in kwargs.items()}
        name = getattr(function, "__name__", "")
        result = function(*args, **kwargs)
        if name in _GIVE_THEIR_INPUT and args and result is args[0]:
            return result
        shaped_by_values = name in _SHAPED_BY_VALUES and not (name == "where" and len(args) > 1)
        shaped_by_values = shaped_by_values or (name in ("__getitem__", "__setitem__") and _reads_index(args[1]))
        if _is_of_tensors(result) or (result is None and name not in _OF_METADATA):
            self._number_all(result)
            self.calls.append(_Call(function, given, named, self._template(result)))
        elif name not in _OF_METADATA and _has_tensor((*args, *kwargs.values())):
            self.reads_values = True
        self.reads_values = self.reads_values or shaped_by_values
        return result

    def end(self, output: Tensor) -> None:
        """Says what the function has returned."""
        self.calls.append(_Call(_identity, (self._template(output),), {}, None))
        self._made = []

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
        for place, call in enumerate(self.calls[:-1]):
            names[f"f{place}"] = call.function
            given = [_source(x, names) for x in call.args]
            given += [f"{name}={_source(x, names)}" for name, x in call.kwargs.items()]
            lines.append(f"    {_target(call.result)} = f{place}({', '.join(given)})")
        lines.append(f"    return {_source(self.calls[-1].args[0], names)}")
        exec(compile("\n".join(lines), "<replay>", "exec"), names)
        function: Callable[..., Tensor] = names["replay"]
        return function

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
        if type(value) in (tuple, list) or type(value).__module__ == "torch.return_types":
            return (list if isinstance(value, list) else tuple)(self._template(part) for part in value)
        return value  # a record that has tensors is another in each recording


def _identity(x: Tensor) -> Tensor:
    return x


def _reads_index(index: Any) -> bool:
    """Whether ``index`` has a mask, which gives as many elements as are true, or a slice up to what a tensor says."""
    if isinstance(index, (tuple, list)):
        return any(map(_reads_index, index))
    if isinstance(index, slice):
        return _has_tensor((index.start, index.stop, index.step))
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _numbers_in(template: Any) -> Iterator[int]:
    if isinstance(template, _Made):
        yield template.number
    elif isinstance(template, (tuple, list)):
        for part in template:
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
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
    if isinstance(a, slice):
        return _same((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return isinstance(a, (int, float, complex, str, torch.device)) and a == b


def _source(template: Any, names: dict[str, Any]) -> str:
    """An expression for ``template``; what has no number is put into ``names``."""
    if isinstance(template, _Made):
        return f"v{template.number}"
    if type(template) in (tuple, list) and _has_number(template):
        parts = "".join(f"{_source(part, names)}, " for part in template)
        return f"({parts})" if type(template) is tuple else f"[{parts}]"
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
