"""Reads a pickle as data: no class or function that it names is looked up, imported or called.

A pickle is a program that builds objects by calling whatever it names. Here every name stands for an ``Inert``, which
records what it was given and does nothing, so that the program can only build a tree of records, lists and dicts.
"""

import io
import pickle
from typing import Any, ClassVar

from megalith.errors import CheckpointError

__all__ = ["Inert", "origin_of", "read_pickle"]

_BYTEARRAY8 = pickle.BYTEARRAY8[0]


class Inert:
    """What a pickle calls an object of the class ``origin``: ``args`` of its construction, ``state`` set later on."""

    origin = ""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.args = args
        self.options = options
        self.state: Any = None
        self.items: list[Any] = []  # of a subclass of dict: (key, value); of one of list: elements

    def __new__(cls, *args: Any, **options: Any) -> "Inert":
        made = super().__new__(cls)
        # __newobj__ skips __init__
        Inert.__init__(made, *args, **options)
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def append(self, item: Any) -> None:
        self.items.append(item)

    def extend(self, items: list[Any]) -> None:
        self.items.extend(items)

    def fields(self) -> dict[str, Any]:
        """The attributes of an object of an ordinary class; empty if it has none by name."""
        return dict(self.state) if isinstance(self.state, dict) else {}


# pickle's reader in Python: the one in C allocates whatever size a hostile program names
class _Reader(pickle._Unpickler):
    # a bytearray is allocated before it is read, whatever size it claims; torch writes none
    dispatch: ClassVar = {code: step for code, step in pickle._Unpickler.dispatch.items() if code != _BYTEARRAY8}

    def find_class(self, module_name: str, global_name: str, /) -> type[Inert]:
        return type("Inert", (Inert,), {"origin": f"{module_name}.{global_name}"})

    def persistent_load(self, pid: Any) -> Inert:
        found = Inert(*pid) if isinstance(pid, tuple) else Inert(pid)
        found.state = "persistent"
        return found

    def get_extension(self, code: int) -> None:
        raise pickle.UnpicklingError(f"extension {code} is not known")


def read_pickle(content: bytes, source: str) -> Any:
    """What ``content`` describes, with ``Inert`` objects for all but numbers, text, bytes and containers.

    Raises CheckpointError, naming ``source``, for anything that is not a sound pickle.
    """
    try:
        return _Reader(io.BytesIO(content)).load()
    except (
        pickle.UnpicklingError,
        EOFError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
        RecursionError,
        MemoryError,
        NotImplementedError,
        AssertionError,
    ) as error:
        raise CheckpointError(f"{source} is not a pickle that can be read as data: {error!r:.200}") from error


def origin_of(value: Any) -> str:
    """The full name of the class or function that ``value`` stands for, or of the class that it is an object of."""
    is_class = isinstance(value, type) and issubclass(value, Inert)
    return value.origin if is_class or isinstance(value, Inert) else type(value).__name__
