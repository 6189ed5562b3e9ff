"""Records the torch calls of a function of tensors, and replays them without the surrounding Python.

For functions called repeatedly on small tensors, such as a model decoding one token per sequence, where a layer's
Python takes longer than its kernels. A CUDA graph does the same for launches; this is device-independent, holds no
memory, and calls functions marked ``called_whole`` as they are, for example a cache that has grown since.

A recording is trusted once the next one, with other values, is the same call for call: the same functions in the same
order, the same numbers, flags and weights, the same tensors passed between calls. If a tensor's value is read in
Python, the function is never replayed. Callers must rule out what two recordings cannot reveal: a branch taken from
some later length or count on, a context entered inside, a random generator seeded there, memory exchanged by
``Tensor.set_`` or ``torch.utils.swap_tensors``.
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

# functions that query a tensor without reading its values; attributes appear as `__get__`
_METADATA = frozenset(
    {"__get__", "__len__", "_is_view", "dim", "element_size", "is_contiguous", "is_floating_point", "numel", "size"}
    | {"stride"}
)
_MAY_RETURN_THEIR_INPUT = frozenset({"float", "to"})  # if it already has that dtype and device
_MOST_RECORDINGS = 8


def called_whole(function: Callable[P, R]) -> Callable[P, R]:
    """Marks ``function`` as opaque to recordings: a replay calls it again, with everything it does.

    For functions that depend on lengths, or on objects that change between calls. Of its arguments, tensors, alone or
    in tuples, are those of each call; everything else is fixed at recording, and a function given a list or a dict is
    not replayed. It must return new tensors, or tuples of them, and must not reshape its arguments in place.
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
    """Wraps ``function``, whose Python runs twice, and later only for inputs of another kind.

    Inputs differ in kind if their class, layout, shape, stride, dtype or device, or the autocast or default dtype,
    differs.

    The function may call only torch and functions marked ``called_whole``, on tensors of one process, without recording
    gradients: manually launched kernels, collectives and hooks are not recorded, and would not be replayed. Weights and
    other tensors that it holds may change in place. What it writes into Python objects is not written again in a
    replay.

    Args:
        function: takes only tensors and returns a tensor.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self._function = function
        self._before: _Recording | None = None
        self._num_recordings_left = _MOST_RECORDINGS
        self._circumstances: list[_Circumstances] = []
        self._program: Callable[..., Tensor] | None = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Returns ``function(*inputs)``."""
        if any(x.layout != torch.strided or x.is_nested for x in inputs):
            return self._function(*inputs)
        circumstances = [_circumstances(x) for x in inputs]
        if self._program is not None and circumstances == self._circumstances:
            return self._program(*inputs)
        if self._program is not None or not self._num_recordings_left:
            return self._function(*inputs)
        # distinct objects, even if a tensor is passed twice or is a weight
        inputs = tuple(x.detach() for x in inputs)
        recording, before = _Recording(inputs), self._before
        output = recording.of(self._function, inputs)
        self._num_recordings_left -= 1
        if circumstances != self._circumstances:
            before = None
        self._before, self._circumstances = recording, circumstances
        if recording.has_to_run or (before is not None and not recording.equals(before)):
            self._num_recordings_left = 0  # recordings that differ once may differ again
        elif before is not None:
            self._program = recording.program()
        if self._program is not None or not self._num_recordings_left:
            self._before = None
        return output


# everything except an input's values that determines what torch does with it
_Circumstances = tuple[type, torch.Size, torch.dtype, tuple[int, ...], torch.device, torch.dtype | None, torch.dtype]


def _circumstances(x: Tensor) -> _Circumstances:
    device = x.device
    has_autocast = not x.is_meta and torch.is_autocast_enabled(device.type)  # torch has no autocast for meta tensors
    autocast = torch.get_autocast_dtype(device.type) if has_autocast else None
    return type(x), x.shape, x.dtype, x.stride(), device, autocast, torch.get_default_dtype()


class _Recording(TorchFunctionMode):
    """While active, records each torch call that creates or changes a tensor.

    Attributes:
        has_to_run: whether calls may depend on tensor values or the contents of containers, and so differ between runs.
        is_in_whole_call: whether the current calls are part of a call that is recorded as a whole.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.num_inputs = len(inputs)
        self.calls: list[Call] = []
        self.has_to_run = self.is_in_whole_call = False
        self._made = list(inputs)  # kept alive, or another tensor could reuse the id or memory of one
        self._places: list[Places | None] = [places_in_memory(x) for x in inputs]  # None: changed during the recording
        self._numbers = {id(x): number for number, x in enumerate(inputs)}

    def of(self, function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Tensor:
        """Returns ``function(*inputs)`` and records it."""
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
        if name in _METADATA:  # four of five calls, of which only those like ``x.T`` return a tensor
            result = function(*args, **kwargs)
            if _is_of_tensors(result):
                self.calls.append(Call(function, self._template(tuple(args)), {}, self._number(result)))
            return result
        given, named = self._template(tuple(args)), {name: self._template(x) for name, x in kwargs.items()}
        with _ReadValues() as read:
            result = function(*args, **kwargs)
        # tensor_split reads the split points without calling an operator that would reveal it
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
        """Returns ``function(*args, **kwargs)`` and records it as one call."""
        given, named = self._template(args), {name: self._template(x) for name, x in kwargs.items()}
        self.is_in_whole_call = True
        try:
            result = function(*args, **kwargs)
            self._note_reshaping((given, named))
            num_made = len(self._made)
            made = self._number(result)
        finally:
            self.is_in_whole_call = False
        # if this call returned an existing tensor, the next one may return a different one
        is_its_own = (result is None or _is_of_tensors(result)) and all(x >= num_made for x in numbers_in(made))
        containers = MutableSequence, MutableMapping, MutableSet
        self.has_to_run = self.has_to_run or not is_its_own or _has_container((*args, *kwargs.values()), *containers)
        self.calls.append(Call(function, given, named, made, is_whole=True))
        return result

    def equals(self, other: "_Recording") -> bool:
        """Returns whether replays of both recordings are equivalent."""
        return same_calls(self.calls, other.calls)

    def program(self) -> Callable[..., Tensor]:
        """Compiles the calls into one function of the inputs."""
        return program_of(self.calls, self.num_inputs, self._places)

    def _template(self, value: Any) -> Any:
        """Returns ``value`` with numbered tensors replaced by ``Made``."""
        if isinstance(value, Tensor):
            return Made(self._numbers[id(value)]) if id(value) in self._numbers else value
        if type(value) in (tuple, list):
            return type(value)(self._template(part) for part in value)
        return value  # an object that holds tensors is compared by identity

    def _number(self, result: Any) -> Any:
        """Returns the template of a ``result``, after assigning a number to each tensor in it."""
        if isinstance(result, (tuple, list)):
            return tuple(self._number(part) for part in result)
        if isinstance(result, Tensor) and id(result) not in self._numbers:
            self._numbers[id(result)] = len(self._made)
            self._made.append(result)
            self._places.append(places_in_memory(result))
        return Made(self._numbers[id(result)]) if isinstance(result, Tensor) else None

    def _note_reshaping(self, given: Any) -> None:
        """After a call: marks which of the tensors passed to it have moved in memory."""
        for number in numbers_in(given):
            if self._places[number] != places_in_memory(self._made[number]):
                self._places[number] = None


class _ReadValues(TorchDispatchMode):
    """Detects operators that return tensor values to Python, or whose output sizes depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.any = False

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if operator is torch.ops.aten.index.Tensor:  # its tag says so even for integer indices
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
    """Returns whether ``value`` is a tensor, or a sequence that contains one."""
    return isinstance(value, Tensor) or (isinstance(value, (tuple, list)) and any(map(_has_tensor, value)))


def _has_container(value: Any, *kinds: type) -> bool:
    """Returns whether ``value`` is a container of one of ``kinds``, or has one in nested tuples and lists."""
    if isinstance(value, kinds):
        return True
    return isinstance(value, (tuple, list)) and any(_has_container(part, *kinds) for part in value)


def _is_of_tensors(result: Any) -> bool:
    """Returns whether ``result`` is a tensor, or a sequence of only tensors and None."""
    if isinstance(result, (tuple, list)) and not isinstance(result, torch.Size):
        return all(part is None or _is_of_tensors(part) for part in result)
    return isinstance(result, Tensor)
