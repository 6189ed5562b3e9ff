"""Opens the store for a path or URL."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from megalith.errors import ConfigError
from megalith.storage.local_store import LocalStore
from megalith.storage.store import Store

__all__ = ["Location", "child", "open_store", "sibling"]

Location = TypeVar("Location", str, Path, Store)
"""A folder, given as a path, a URL or an open store. Functions return the type that they were given."""

_SEPARATOR = "://"
# URL scheme -> function that opens the rest of the URL
_STORES: dict[str, Callable[[str], Store]] = {"file": lambda path: LocalStore(Path(path))}


def open_store(location: str | Path | Store) -> Store:
    """Returns the folder ``location``: a path, a URL such as ``file:///data``, or a store, which is returned as is.

    Raises:
        ConfigError: the URL has a scheme without a store.
    """
    if isinstance(location, Store):
        return location
    scheme, separator, rest = str(location).partition(_SEPARATOR)
    if isinstance(location, Path) or not separator:
        return LocalStore(Path(location))
    if scheme not in _STORES:
        raise ConfigError(
            f"{location} must be a path, or a URL with a supported scheme ({', '.join(_STORES)}); got {scheme}"
        )
    return _STORES[scheme](rest)


def child(location: Location, name: str) -> Location:
    """Returns the folder ``name`` inside ``location``."""
    if isinstance(location, str):
        return f"{location.rstrip('/')}/{name}"
    return location / name


def sibling(location: Location, name: str) -> Location:
    """Returns the folder ``name`` beside ``location``."""
    if isinstance(location, str):
        folder, slash, _ = location.rstrip("/").rpartition("/")
        return f"{folder}{slash}{name}"
    if isinstance(location, Path):
        return location.with_name(name)
    return location.split()[0] / name
