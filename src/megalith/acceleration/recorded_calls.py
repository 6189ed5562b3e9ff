"""The calls of torch of a recording: when two are the same, and a Python function that makes them again.

In a call's arguments and result ``Made`` stands for each tensor that the recording has seen made: ``x + 1.0`` of the
first input is ``Call(add, (Made(0), 1.0), {}, Made(1))``. What has no number, a weight for instance, stands for itself.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from keyword import iskeyword
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Call", "Made", "Places", "numbers_in", "places_in_memory", "program_of", "same_calls"]

Places = tuple[object, ...]

# nothing but the same numbers again, where the result is in the same places
_VIEWS = frozenset(
    {"__getitem__", "chunk", "expand", "narrow", "permute", "select", "t", "transpose", "unbind", "unsqueeze", "view"}
)
_FRESH = frozenset({"empty", "new_empty"})


class Made(NamedTuple):
    """The tensor that has this number: the inputs come first, then results in their order."""

    number: int


class Call(NamedTuple):
    """A call of ``function``.

    Attributes:
        args, kwargs, result: with ``Made`` in place of every tensor except those from outside.
        is_whole: whether the function may do anything, and change with each call.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    is_whole: bool = False


def places_in_memory(x: Tensor) -> Places:
    """Where the numbers of ``x`` are: two tensors that are alive at once, in the same places, hold the same numbers."""
    if x.layout != torch.strided or x.is_nested:
        return (id(x),)
    return x.untyped_storage().data_ptr(), x.storage_offset(), x.shape, x.stride(), x.dtype


def same_calls(calls: list[Call], others: list[Call]) -> bool:
    """Whether making ``calls`` again is making ``others`` again."""
    return len(calls) == len(others) and all(map(_are_the_same, calls, others))


def program_of(calls: list[Call], num_inputs: int, places: Sequence[Places | None]) -> Callable[..., Tensor]:
    """``calls`` as one function of the inputs, which returns the first argument of the last call.

    Args:
        places: of each tensor that has a number, by its number; None where they have changed in the recording.
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
    # its globals are ``names``: in them it would be a reference cycle, freed only when the garbage collector runs
    function: Callable[..., Tensor] = names.pop("replay")
    return function


def numbers_in(template: Any) -> Iterator[int]:
    """Of the tensors in ``template`` that have one."""
    if isinstance(template, Made):
        yield template.number
    elif isinstance(template, (tuple, list, dict)):
        for part in template.values() if isinstance(template, dict) else template:
            yield from numbers_in(part)


def _has_number(template: Any) -> bool:
    """Whether ``template`` is of a tensor that the recording has seen made."""
    return next(numbers_in(template), None) is not None


def _are_the_same(a: Call, b: Call) -> bool:
    if a.function != b.function or a.is_whole != b.is_whole:
        return False
    return _same((a.args, a.kwargs, a.result), (b.args, b.kwargs, b.result))


def _without_repeated_views(calls: list[Call], places: Sequence[Places | None]) -> list[Call]:
    """``calls``, in which a view of the same numbers of the same tensor is taken once: each layer takes its own."""
    kept: list[Call] = []
    first_names: dict[int, int] = {}
    views = defaultdict[tuple[Any, int], list[Call]](list)  # by the function and the tensor
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
    # a copy is elsewhere, and so is a view of a tensor that has been reshaped in between; with other arguments it may
    # be elsewhere in the next call, where a cache has grown
    places_of_a, places_of_b = ([places[number] for number in numbers_in(x.result)] for x in (a, b))
    return None not in places_of_a and places_of_a == places_of_b and _same((a.args, a.kwargs), (b.args, b.kwargs))


def _those_that_are_read(calls: list[Call]) -> list[Call]:
    """``calls`` without views and fresh memory that no later one names."""
    kept: list[Call] = []
    read: set[int] = set()
    for call in reversed(calls):
        if _name(call) in _VIEWS | _FRESH and read.isdisjoint(numbers_in(call.result)):
            continue
        read.update(numbers_in((call.args, call.kwargs)))
        kept.append(call)
    return kept[::-1]


def _name(call: Call) -> str:
    """Of torch's function; none of one that is called whole, and does what it likes."""
    return "" if call.is_whole else getattr(call.function, "__name__", "")


def _renamed(template: Any, names: dict[int, int]) -> Any:
    """``template`` with ``names`` for the numbers that have another one."""
    if isinstance(template, Made):
        return Made(names.get(template.number, template.number))
    if not _has_number(template):
        return template
    if isinstance(template, dict):
        return {name: _renamed(part, names) for name, part in template.items()}
    parts = [_renamed(part, names) for part in template]
    return tuple(parts) if isinstance(template, tuple) else parts


def _same(a: Any, b: Any) -> bool:
    """Whether two templates are the same tensor, object or number."""
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
    # as text -0.0 is not 0.0
    return isinstance(a, (int, float, complex, str, torch.device)) and repr(a) == repr(b)


def _source(template: Any, names: dict[str, Any]) -> str:
    """An expression for ``template``; what has no number is put into ``names``."""
    if isinstance(template, Made):
        return f"v{template.number}"
    if _has_number(template):
        parts = "".join(f"{_source(part, names)}, " for part in template)
        return f"({parts})" if isinstance(template, tuple) else f"[{parts}]"
    name = f"c{len(names)}"
    names[name] = template
    return name


def _target(result: Any) -> str:
    """What a result is assigned to: the tensors that later calls name."""
    if isinstance(result, Made):
        return f"v{result.number}"
    if isinstance(result, (tuple, list)):
        return "(" + "".join(f"{_target(part)}, " for part in result) + ")"
    return "_"
