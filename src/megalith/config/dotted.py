"""Values of a nested tree by dotted name: ``optim.adamw.eps``."""

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["leaves", "look_up", "parent", "put_", "take_out_"]


def parent(name: str) -> str:
    """The group that ``name`` is in; empty at the top."""
    return name.rpartition(".")[0]


def look_up(tree: Any, name: str) -> Any:
    """The value at ``name``, or None if there is none."""
    for part in name.split("."):
        if not isinstance(tree, Mapping):
            return None
        tree = tree.get(part)
    return tree


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of everything in ``tree`` that is not a mapping."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def put_(tree: dict[str, Any], name: str, value: Any) -> None:
    """Sets ``name``; a value in the place of one of its groups is replaced by that group."""
    *groups, leaf = name.split(".")
    for group in groups:
        if not isinstance(tree.get(group), dict):
            tree[group] = {}
        tree = tree[group]
    tree[leaf] = value


def take_out_(tree: dict[str, Any], name: str) -> None:
    """Removes ``name`` if it is there, and nested groups that become empty; top-level groups stay."""
    if name in tree:  # first, because an unknown name may have a dot in it
        del tree[name]
        return
    group, _, rest = name.partition(".")
    place = tree.get(group)
    if not isinstance(place, dict):
        return
    take_out_(place, rest)
    inner, _, deeper = rest.partition(".")
    if deeper and place.get(inner) == {}:
        del place[inner]
