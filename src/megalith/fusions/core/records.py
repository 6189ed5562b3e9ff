"""Operands by name: functions that take the fields of a NamedTuple, ``*operands: Unpack[Record]``, and their schema.

A torch operator cannot take a record, only its fields one by one. Functions declare them through the record, which
defines names and types once; the names are those of the operator's schema.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import get_args, get_type_hints

__all__ = ["flat_signature"]


def flat_signature(function: Callable[..., object]) -> inspect.Signature:
    """The signature of ``function`` with ``*operands: Unpack[Record]`` replaced by the record's fields."""
    signature = inspect.signature(function)
    parameters = [field for parameter in signature.parameters.values() for field in _fields(parameter)]
    return signature.replace(parameters=parameters)


def _fields(parameter: inspect.Parameter) -> Iterator[inspect.Parameter]:
    if parameter.kind is not parameter.VAR_POSITIONAL:
        yield parameter
        return
    (record,) = get_args(parameter.annotation)
    for name, annotation in get_type_hints(record).items():
        yield inspect.Parameter(name, parameter.POSITIONAL_OR_KEYWORD, annotation=annotation)
