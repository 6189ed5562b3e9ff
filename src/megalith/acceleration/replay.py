"""A function of tensors whose calls of torch are recorded, and then made again without the Python around them.

For what is called over and over on few numbers, as a model is on one new token of each text: a layer's Python takes
longer there than its kernels. A CUDA graph does the same for launches; this one knows no device, keeps no memory, and
calls again as a whole what is ``called_whole``, for instance a cache that has grown since.

A recording is trusted once the next one, of other values, is the same call for call: the same functions in the same
order, the same numbers, flags and weights, the same tensors from one to the next. Where a value is read, the function
is called as it is. What two recordings cannot show is for the caller to rule out: a branch taken from some later length
or count on, a context entered inside, a number generator seeded there, memory exchanged by ``Tensor.set_`` or
``torch.utils.swap_tensors``.
"""

import functools
from collections.abc import Callable, MutableMapping, MutableSequence, MutableSet, Sequence
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megalith.acceleration.recorded_calls import (
    Call,
    Made,
    Places,
    numbers_in,
    places_in_memory,
    program_of,
    same_calls,
)

__all__ = ["Replayed", "called_whole"]

P = ParamSpec("P")
R = TypeVar("R")

# what says something of a tensor without reading its values; attributes come as `__get__`
_METADATA = frozenset(
    {"__get__", "__len__", "_is_view", "dim", "element_size", "is_contiguous", "is_floating_point", "numel", "size"}
    | {"stride"}
)
_MAY_RETURN_THEIR_INPUT = frozenset({"float", "to"})  # where it has that dtype and device already
_MOST_RECORDINGS = 8


def called_whole(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, which a recording does not look into: it is called again with all that it does.

    For what depends on lengths, or on objects that change between calls. Of its arguments tensors, alone or in tuples,
    are those of each call, and all else is the recording's: a function that is given a list or a dict is not replayed.
    It returns tensors of its own, or tuples of them, and leaves those that it is given in their shape.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        recording = _current.get()
        if recording is None or recording.is_in_whole_call:
            return function(*args, **kwargs)
        result: R = recording.call_whole(function, args, kwargs)
        return result

    return call


class Replayed:
    """``function``, whose Python runs twice, and then for calls with inputs of another kind.

    That is of another class, layout, shape, stride, dtype or device, or under another autocast or default dtype.

    It may call nothing but torch, and what is ``called_whole``, on tensors of one process, and record no gradient:
    kernels that are launched by hand, collectives and hooks are not seen, and would not be called again. Weights and
    other tensors that it holds may change in place, and what it writes into objects of Python is not written again.

    Args:
        function: of tensors alone, returning a tensor.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self._function = function
        self._before: _Recording | None = None
        self._num_recordings_left = _MOST_RECORDINGS
        self._circumstances: list[_Circumstances] = []
        self._program: Callable[..., Tensor] | None = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        """What ``function`` gives for ``inputs``."""
        if any(x.layout != torch.strided or x.is_nested for x in inputs):
            return self._function(*inputs)
        circumstances = [_circumstances(x) for x in inputs]
        if self._program is not None and circumstances == self._circumstances:
            return self._program(*inputs)
        if self._program is not None or not self._num_recordings_left:
            return self._function(*inputs)
        # objects of their own, also where one is given twice, or is a weight
        inputs = tuple(x.detach() for x in inputs)
        recording, before = _Recording(inputs), self._before
        output = recording.of(self._function, inputs)
        self._num_recordings_left -= 1
        if circumstances != self._circumstances:
            before = None
        self._before, self._circumstances = recording, circumstances
        if recording.has_to_run or (before is not None and not recording.equals(before)):
            self._num_recordings_left = 0  # what has differed once may do so again
        elif before is not None:
            self._program = recording.program()
        if self._program is not None or not self._num_recordings_left:
            self._before = None
        return output


# what decides, beside an input's values, what torch does with it
_Circumstances = tuple[type, torch.Size, torch.dtype, tuple[int, ...], torch.device, torch.dtype | None, torch.dtype]


def _circumstances(x: Tensor) -> _Circumstances:
    device = x.device
    has_autocast = not x.is_meta and torch.is_autocast_enabled(device.type)  # torch has none for meta tensors
    autocast = torch.get_autocast_dtype(device.type) if has_autocast else None
    return type(x), x.shape, x.dtype, x.stride(), device, autocast, torch.get_default_dtype()


class _Recording(TorchFunctionMode):
    """While it is entered, writes down each call of torch that gives or changes a tensor.

    Attributes:
        has_to_run: whether the calls may depend on values of tensors or the contents of containers, and so may differ.
        is_in_whole_call: whether what is called now is part of a call that has been written down.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.num_inputs = len(inputs)
        self.calls: list[Call] = []
        self.has_to_run = self.is_in_whole_call = False
        self._made = list(inputs)  # held, or another tensor could get the identity of one, or its memory
        self._places: list[Places | None] = [places_in_memory(x) for x in inputs]  # None: not the same throughout
        self._numbers = {id(x): number for number, x in enumerate(inputs)}

    def of(self, function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Tensor:
        """What ``function`` gives for ``inputs``, recorded."""
        before = _current.set(self)
        try:
            with self:
                output = function(*inputs)
        finally:
            _current.reset(before)
        self.calls.append(Call(_identity, (self._template(output),), {}, None))
        self._made = []
        return output

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if self.is_in_whole_call:
            return function(*args, **kwargs)
        if name in _METADATA:  # four calls of five, of which only such as ``x.T`` give a tensor
            result = function(*args, **kwargs)
            if _is_of_tensors(result):
                self.calls.append(Call(function, self._template(tuple(args)), {}, self._number(result)))
            return result
        given, named = self._template(tuple(args)), {name: self._template(x) for name, x in kwargs.items()}
        with _ReadValues() as read:
            result = function(*args, **kwargs)
        # tensor_split reads where to split, and calls no operator that would tell
        self.has_to_run = self.has_to_run or read.any or (name == "tensor_split" and _has_tensor(args[1:]))
        self.has_to_run = self.has_to_run or _has_container((*args, *kwargs.values()), MutableMapping)
        if name in _MAY_RETURN_THEIR_INPUT and args and result is args[0]:
            return result
        if _is_of_tensors(result) or result is None:
            self.calls.append(Call(function, given, named, self._number(result)))
            self._note_reshaping((given, named))
        elif _has_tensor((*args, *kwargs.values())):
            self.has_to_run = True
        return result

    def call_whole(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``function`` gives for its arguments, recorded as one call."""
        given, named = self._template(args), {name: self._template(x) for name, x in kwargs.items()}
        self.is_in_whole_call = True
        try:
            result = function(*args, **kwargs)
            self._note_reshaping((given, named))
            num_made = len(self._made)
            made = self._number(result)
        finally:
            self.is_in_whole_call = False
        # where this call returned an existing tensor, the next one may return a different tensor in its place
        is_its_own = (result is None or _is_of_tensors(result)) and all(x >= num_made for x in numbers_in(made))
        containers = MutableSequence, MutableMapping, MutableSet
        self.has_to_run = self.has_to_run or not is_its_own or _has_container((*args, *kwargs.values()), *containers)
        self.calls.append(Call(function, given, named, made, is_whole=True))
        return result

    def equals(self, other: "_Recording") -> bool:
        """Whether a replay of the one is one of the other."""
        return same_calls(self.calls, other.calls)

    def program(self) -> Callable[..., Tensor]:
        """The calls as one function of the inputs."""
        return program_of(self.calls, self.num_inputs, self._places)

    def _template(self, value: Any) -> Any:
        """``value`` with ``Made`` for tensors that have a number."""
        if isinstance(value, Tensor):
            return Made(self._numbers[id(value)]) if id(value) in self._numbers else value
        if type(value) in (tuple, list):
            return type(value)(self._template(part) for part in value)
        return value  # a record that has tensors is the same for two calls, or another one

    def _number(self, result: Any) -> Any:
        """The template of a ``result``, all tensors of which have a number from here on."""
        if isinstance(result, (tuple, list)):
            return tuple(self._number(part) for part in result)
        if isinstance(result, Tensor) and id(result) not in self._numbers:
            self._numbers[id(result)] = len(self._made)
            self._made.append(result)
            self._places.append(places_in_memory(result))
        return Made(self._numbers[id(result)]) if isinstance(result, Tensor) else None

    def _note_reshaping(self, given: Any) -> None:
        """After a call: which of the tensors that it has been ``given`` are elsewhere since."""
        for number in numbers_in(given):
            if self._places[number] != places_in_memory(self._made[number]):
                self._places[number] = None


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
        elif _depends_on_values(operator):
            self.any = True
        return operator(*args, **(kwargs or {}))


@functools.cache
def _depends_on_values(operator: torch._ops.OpOverload) -> bool:
    return not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.isdisjoint(operator.tags)


_current: ContextVar[_Recording | None] = ContextVar("current recording", default=None)


def _identity(x: Tensor) -> Tensor:
    return x


def _has_tensor(value: Any) -> bool:
    """Whether ``value`` is a tensor, or a sequence with one in it."""
    return isinstance(value, Tensor) or (isinstance(value, (tuple, list)) and any(map(_has_tensor, value)))


def _has_container(value: Any, *kinds: type) -> bool:
    """Whether ``value`` is, or has in tuples and lists, a container of one of ``kinds``."""
    if isinstance(value, kinds):
        return True
    return isinstance(value, (tuple, list)) and any(_has_container(part, *kinds) for part in value)


def _is_of_tensors(result: Any) -> bool:
    """Whether ``result`` is a tensor, or a sequence of tensors, or of None, and tells Python nothing else."""
    if isinstance(result, (tuple, list)) and not isinstance(result, torch.Size):
        return all(part is None or _is_of_tensors(part) for part in result)
    return isinstance(result, Tensor)
