"""Checks whether a run may continue from a checkpoint: what has changed, and whether that would repeat or skip text.

A run's position in its data is one number, the samples consumed. It refers to the same text as long as the data, the
tokens per sample and the seed are the same, so a run does not continue if one of these has changed. Every other
setting, including batch size and layout, may change between two starts, and one line reports the changes.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from megalith.config import RunConfig, as_tree, load_run
from megalith.data.samples import Samples
from megalith.errors import ConfigError, DataError
from megalith.storage import shown
from megalith.topology.agreement import agreed, all_gather, everywhere
from megalith.training.tasks.task import AnyTask

__all__ = [
    "changed",
    "check_ranks_have_one_recipe",
    "comparable_settings",
    "compared",
    "data_identity",
    "kept_settings",
    "with_absolute_paths",
]

_OF_ONE_START = ("run", "load", "resume")  # where a run is and what it starts from, not what it computes
_PATHS = ("train", "valid", "tokenizer")  # settings of the group data
_ABSENT = object()


def data_identity(task: AnyTask, dataset: Samples[Any]) -> dict[str, Any]:
    """Returns ``Task.data_identity`` of the training data, which must be the same on all ranks. Collective.

    Raises:
        DataError: on every rank, if ranks read different data, or the identity has values that JSON would change.
    """
    with agreed("the training data cannot be used"):
        identity = dict(task.data_identity(dataset))
        for name, value in identity.items():
            if not isinstance(value, str | int | float | None):
                raise DataError(
                    f"the identity of the training data must have plain values; {type(task).__name__} gives "
                    f"{name} = {value!r:.60}; give a string, such as a SHA-256"
                )
    found = all_gather(identity)
    for number, other in enumerate(found):
        if different := changed(found[0], other):
            raise everywhere(
                DataError(
                    f"all ranks must read the same training data; rank 0 and rank {number} differ in "
                    f"{', '.join(different)}; put the files where every machine can read them"
                )
            )
    return identity


def check_ranks_have_one_recipe(config: RunConfig) -> None:
    """Checks that all ranks have the same settings. Collective.

    Ranks with different settings would wait for each other in different collectives. Paths of files may differ, because
    their contents are compared when they are read.

    Raises:
        ConfigError: on every rank; lists the differences.
    """
    tree = as_tree(config)
    data = {**tree["data"], **dict.fromkeys(_PATHS)}
    settings = {**tree, "data": data, "run": None, "load": config.load is not None}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()
    if len(set(all_gather(digest))) == 1:
        return
    found = all_gather(settings)
    for number, other in enumerate(found):
        if different := changed(found[0], other):
            raise everywhere(
                ConfigError(
                    f"all ranks must be started with the same settings; rank 0 and rank {number} differ in "
                    f"{', '.join(different)}; start every rank with the same recipe and overrides"
                )
            )


def kept_settings(config: RunConfig) -> dict[str, Any]:
    """Returns the settings that a checkpoint keeps: all but the run's location and start; paths are absolute."""
    tree = as_tree(with_absolute_paths(config))
    return {name: value for name, value in tree.items() if name not in _OF_ONE_START}


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Returns ``config`` with absolute paths, so that it is valid in any working directory."""
    data = {name: _absolute(getattr(config.data, name)) for name in _PATHS}
    update = {"data": config.data.model_copy(update=data), "load": _absolute(config.load), "run": _absolute(config.run)}
    return config.model_copy(update=update)


def comparable_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> Mapping[str, Any]:
    """Converts a checkpoint's settings ``before`` to this version's names, to compare them with kept settings ``now``.

    Settings that the checkpoint's version did not have get their defaults. That version stored paths as given: a path
    that resolves to that of ``now`` from the current working directory counts as the same.
    """
    try:
        tree = as_tree(load_run(before))
    except ConfigError:  # a setting no longer exists: report all differences
        return before
    data, data_now = tree["data"], now["data"]
    same = {name: data_now[name] for name in _PATHS if _absolute(data.get(name)) == data_now.get(name)}
    return {**{name: tree[name] for name in tree if name not in _OF_ONE_START}, "data": {**data, **same}}


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns ``name before -> now`` for every value that differs, with dotted names for nested values."""
    return [f"{name} {_said(old)} -> {_said(new)}" for name, old, new in _pairs(before, now) if old != new]


def compared(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns the names that are not None in both; if either is missing, there is nothing to compare."""
    return [name for name, value in before.items() if value is not None and now.get(name) is not None]


def _pairs(before: Mapping[str, Any], now: Mapping[str, Any], inside: str = "") -> Iterator[tuple[str, Any, Any]]:
    for name in [*now, *(name for name in before if name not in now)]:
        old, new = before.get(name, _ABSENT), now.get(name, _ABSENT)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _pairs(old, new, f"{inside}{name}.")
        else:
            yield inside + name, old, new


def _said(value: Any) -> str:
    return "(not set)" if value is _ABSENT else shown(value)


def _absolute(location: Any) -> Any:
    """Makes a path absolute; accepts a path, a URL, None, or a mapping to these."""
    if isinstance(location, Mapping):
        return {name: _absolute(each) for name, each in location.items()}
    return location if location is None or "://" in location else os.path.abspath(location)
