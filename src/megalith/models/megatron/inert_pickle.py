"""Reads a pickle as data: no class or function that it names is looked up, imported or called.

A pickle is a program that builds objects by calling whatever it names. Here every name resolves to an ``Inert`` class,
which only records its arguments, so that the program can only build a tree of records, lists and dicts.
"""

import io
import pickle
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, cast

from megalith.errors import CheckpointError

__all__ = ["Inert", "origin_of", "read_pickle", "shown"]

_BYTEARRAY8 = pickle.BYTEARRAY8[0]
# limits on objects and containers, which take some 100 bytes each; a tensor's description has one per 20 bytes
_FREE_OBJECTS, _BYTES_OF_AN_OBJECT = 1000, 8
_MOST_CLASSES = 1000


class Inert:
    """Stands in for an object of the class ``origin``: the ``args`` of its constructor, and the ``state`` set later."""

    __slots__ = ("args", "items", "state")
    origin = ""
    args: tuple[Any, ...]
    state: Any
    items: list[Any] | None  # (key, value) of a dict subclass, elements of a list subclass

    def __new__(cls, *args: Any, **options: Any) -> "Inert":
        made = super().__new__(cls)
        made.args = args
        made.state = options or None
        made.items = None
        return made

    def __init__(self, *args: Any, **options: Any) -> None:
        """Does nothing; ``__new__`` does all the work, as some pickles only call that."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.append((key, value))

    def append(self, item: Any) -> None:
        self.extend([item])

    def extend(self, items: list[Any]) -> None:
        if self.items is None:
            self.items = []
        self.items += items  # in place: a copy for each element would be quadratic

    def fields(self) -> dict[str, Any]:
        """Returns the attributes of an object of an ordinary class; empty if it has no named ones."""
        return dict(self.state) if isinstance(self.state, dict) else {}


def _keys_of_pairs(reader: "_Reader") -> list[Any]:
    return reader.stack[::2]


def _key_on_top(reader: "_Reader") -> list[Any]:
    return reader.stack[-2:-1]


def _elements(reader: "_Reader") -> list[Any]:
    return reader.stack


# what each opcode hashes; Python's hash of nested tuples recurses without limit, and crashes the process
_HASHED: Mapping[bytes, Callable[["_Reader"], list[Any]]] = MappingProxyType(
    {
        pickle.SETITEM: _key_on_top,
        pickle.SETITEMS: _keys_of_pairs,
        pickle.DICT: _keys_of_pairs,
        pickle.ADDITEMS: _elements,
        pickle.FROZENSET: _elements,
    }
)
_MAKES = frozenset(
    [
        *(pickle.EMPTY_DICT, pickle.EMPTY_LIST, pickle.EMPTY_SET, pickle.DICT, pickle.LIST, pickle.FROZENSET),
        *(pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
        *(pickle.REDUCE, pickle.NEWOBJ, pickle.NEWOBJ_EX, pickle.INST, pickle.OBJ, pickle.PERSID, pickle.BINPERSID),
    ]
)


def _guarded(code: int) -> Callable[["_Reader"], None]:
    """Returns pickle's own handler of the opcode ``code``, with limits on what it hashes and creates."""
    step, opcode = pickle._Unpickler.dispatch[code], bytes([code])
    hashed, makes = _HASHED.get(opcode), opcode in _MAKES

    def guarded(reader: "_Reader") -> None:
        if hashed is not None and not all(isinstance(key, str | int | Inert) for key in hashed(reader)):
            raise pickle.UnpicklingError("a key is neither a string nor an integer")
        if makes:
            reader.num_left -= 1
            if reader.num_left < 0:
                raise pickle.UnpicklingError("it creates more objects than a file of its size should")
        step(cast(pickle.Unpickler, reader))

    return guarded if hashed is not None or makes else cast(Callable[["_Reader"], None], step)


# pickle's reader in Python: the one in C allocates whatever size a malicious pickle claims
class _Reader(pickle._Unpickler):
    # a bytearray is allocated before it is read, whatever size it claims; torch writes none
    dispatch: ClassVar[dict[int, Any]] = {
        code: _guarded(code) for code in pickle._Unpickler.dispatch if code != _BYTEARRAY8
    }
    stack: list[Any]  # pickle's own: what is above the last mark

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self.num_left = _FREE_OBJECTS + len(content) // _BYTES_OF_AN_OBJECT
        self.classes: dict[str, type[Inert]] = {}

    def find_class(self, module_name: str, global_name: str, /) -> type[Inert]:
        origin = f"{module_name}.{global_name}"
        if origin not in self.classes:
            if len(self.classes) == _MOST_CLASSES:
                raise pickle.UnpicklingError(f"it names more than {_MOST_CLASSES} classes")
            self.classes[origin] = type("Inert", (Inert,), {"origin": origin, "__slots__": ()})
        return self.classes[origin]

    def persistent_load(self, pid: Any) -> Inert:
        return Inert(*pid) if isinstance(pid, tuple) else Inert(pid)

    def get_extension(self, code: int) -> None:
        raise pickle.UnpicklingError(f"extension code {code} is unknown")


def read_pickle(content: bytes, source: str) -> Any:
    """Returns what ``content`` describes, with ``Inert`` objects for all but numbers, text, bytes and containers.

    Raises CheckpointError, naming ``source``, for an invalid pickle.
    """
    try:
        return _Reader(content).load()
    except Exception as error:  # an untrusted pickle may raise anything
        told = str(error) if isinstance(error, pickle.UnpicklingError) else type(error).__name__
        raise CheckpointError(f"{source} is not a pickle that can be read as data: {told:.200}") from error


def origin_of(value: Any) -> str:
    """Returns the full name of the class or function that ``value`` stands for, or of the class of ``value``."""
    is_class = isinstance(value, type) and issubclass(value, Inert)
    return value.origin if is_class or isinstance(value, Inert) else type(value).__name__


def shown(value: Any) -> str:
    """Formats an untrusted ``value`` briefly; the repr of nested lists has unbounded length."""
    if isinstance(value, str):
        return repr(value[:80])
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    return repr(value) if isinstance(value, int | float | None) else origin_of(value)
