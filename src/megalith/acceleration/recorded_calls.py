"""Recorded torch calls: comparing two recordings, and compiling one into a Python function that replays it.

In the arguments and result of a call, ``Made`` stands for each tensor created during the recording: ``x + 1.0`` of the
first input is ``Call(add, (Made(0), 1.0), {}, Made(1))``. Tensors without a number, such as weights, stand for
themselves.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from keyword import iskeyword
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Call", "Made", "Places", "numbers_in", "places_in_memory", "program_of", "same_calls"]

Places = tuple[object, ...]

# functions whose result, if it occupies the same memory, has the same values
_VIEWS = frozenset(
    {"__getitem__", "chunk", "expand", "narrow", "permute", "select", "t", "transpose", "unbind", "unsqueeze", "view"}
)
_FRESH = frozenset({"empty", "new_empty"})


class Made(NamedTuple):
    """The tensor with this number: the inputs come first, then results in order."""

    number: int


class Call(NamedTuple):
    """A call of ``function``.

    Attributes:
        args, kwargs, result: with ``Made`` in place of every tensor except external ones.
        is_whole: whether the function is opaque: it may do anything, and behave differently in each call.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    is_whole: bool = False


def places_in_memory(x: Tensor) -> Places:
    """Returns the memory that ``x`` occupies: two live tensors with the same places hold the same values."""
    if x.layout != torch.strided or x.is_nested:
        return (id(x),)
    return x.untyped_storage().data_ptr(), x.storage_offset(), x.shape, x.stride(), x.dtype


def same_calls(calls: list[Call], others: list[Call]) -> bool:
    """Returns whether replaying ``calls`` is equivalent to replaying ``others``."""
    return len(calls) == len(others) and all(map(_are_the_same, calls, others))


def program_of(calls: list[Call], num_inputs: int, places: Sequence[Places | None]) -> Callable[..., Tensor]:
    """Compiles ``calls`` into one function of the inputs, which returns the first argument of the last call.

    Args:
        places: of each numbered tensor, by number; None if they changed during the recording.
    """
    names: dict[str, Any] = {}
    lines = [f"def replay({', '.join(f'v{number}' for number in range(num_inputs))}):"]
    calls = _those_that_are_read(_without_repeated_views(calls, places))
    for place, call in enumerate(calls[:-1]):
        names[f"f{place}"] = call.function
        given = [_source(x, names) for x in call.args]
        given += [
            f"{name}={_source(x, names)}"
            if name.isidentifier() and not iskeyword(name)
            else f"**{{{name!r}: {_source(x, names)}}}"
            for name, x in call.kwargs.items()
        ]
        lines.append(f"    {_target(call.result)} = f{place}({', '.join(given)})")
    lines.append(f"    return {_source(calls[-1].args[0], names)}")
    exec(compile("\n".join(lines), "<replay>", "exec"), names)
    # its globals are ``names``: keeping it there would be a reference cycle, freed only by the garbage collector
    function: Callable[..., Tensor] = names.pop("replay")
    return function


def numbers_in(template: Any) -> Iterator[int]:
    """Yields the numbers of the tensors in ``template``."""
    if isinstance(template, Made):
        yield template.number
    elif isinstance(template, (tuple, list, dict)):
        for part in template.values() if isinstance(template, dict) else template:
            yield from numbers_in(part)


def _has_number(template: Any) -> bool:
    """Returns whether ``template`` contains a tensor created during the recording."""
    return next(numbers_in(template), None) is not None


def _are_the_same(a: Call, b: Call) -> bool:
    if a.function != b.function or a.is_whole != b.is_whole:
        return False
    return _same((a.args, a.kwargs, a.result), (b.args, b.kwargs, b.result))


def _without_repeated_views(calls: list[Call], places: Sequence[Places | None]) -> list[Call]:
    """Returns ``calls`` with each distinct view of a tensor taken only once: otherwise every layer takes its own."""
    kept: list[Call] = []
    first_names: dict[int, int] = {}
    views = defaultdict[tuple[Any, int], list[Call]](list)  # by function and tensor
    for call in calls:
        args, kwargs = _renamed(call.args, first_names), _renamed(call.kwargs, first_names)
        call = call._replace(args=args, kwargs=kwargs)
        if _name(call) in _VIEWS and args:
            known = views[call.function, args[0].number if isinstance(args[0], Made) else id(args[0])]
            same = next((view for view in known if _is_the_same_view(view, call, places)), None)
            if same is not None:
                first_names |= dict(zip(numbers_in(call.result), numbers_in(same.result), strict=True))
                continue
            known.append(call)
        kept.append(call)
    return kept


def _is_the_same_view(a: Call, b: Call, places: Sequence[Places | None]) -> bool:
    # a copy has other memory, as has a view of a tensor that was reshaped in between; with other arguments, the memory
    # may differ in the next call, for example because a cache has grown
    places_of_a, places_of_b = ([places[number] for number in numbers_in(x.result)] for x in (a, b))
    return None not in places_of_a and places_of_a == places_of_b and _same((a.args, a.kwargs), (b.args, b.kwargs))


def _those_that_are_read(calls: list[Call]) -> list[Call]:
    """Returns ``calls`` without views and new memory that no later call uses."""
    kept: list[Call] = []
    read: set[int] = set()
    for call in reversed(calls):
        if _name(call) in _VIEWS | _FRESH and read.isdisjoint(numbers_in(call.result)):
            continue
        read.update(numbers_in((call.args, call.kwargs)))
        kept.append(call)
    return kept[::-1]


def _name(call: Call) -> str:
    """Returns the name of torch's function; empty for an opaque call."""
    return "" if call.is_whole else getattr(call.function, "__name__", "")


def _renamed(template: Any, names: dict[int, int]) -> Any:
    """Returns ``template`` with the numbers in ``names`` replaced."""
    if isinstance(template, Made):
        return Made(names.get(template.number, template.number))
    if not _has_number(template):
        return template
    if isinstance(template, dict):
        return {name: _renamed(part, names) for name, part in template.items()}
    parts = [_renamed(part, names) for part in template]
    return tuple(parts) if isinstance(template, tuple) else parts


def _same(a: Any, b: Any) -> bool:
    """Returns whether two templates are the same tensor, object or number."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) is dict:
        a, b = tuple(a.items()), tuple(b.items())
    if type(a) is slice:
        a, b = (a.start, a.stop, a.step), (b.start, b.stop, b.step)
    if type(a) in (tuple, list, torch.Size, Made):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    # repr distinguishes -0.0 from 0.0
    return isinstance(a, (int, float, complex, str, torch.device)) and repr(a) == repr(b)


def _source(template: Any, names: dict[str, Any]) -> str:
    """Returns an expression for ``template``; parts without a number are added to ``names``."""
    if isinstance(template, Made):
        return f"v{template.number}"
    if _has_number(template):
        parts = "".join(f"{_source(part, names)}, " for part in template)
        return f"({parts})" if isinstance(template, tuple) else f"[{parts}]"
    name = f"c{len(names)}"
    names[name] = template
    return name


def _target(result: Any) -> str:
    """Returns the assignment target for a result: the tensors that later calls refer to."""
    if isinstance(result, Made):
        return f"v{result.number}"
    if isinstance(result, (tuple, list)):
        return "(" + "".join(f"{_target(part)}, " for part in result) + ")"
    return "_"
