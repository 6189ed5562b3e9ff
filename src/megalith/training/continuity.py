"""Whether a run may go on from a checkpoint: what has changed since, and what of it would repeat or skip text.

A run's position in its data is one number, the samples consumed. It means the same text as long as the data, the tokens
of a sample and the seed are the same: these are compared, and a run does not go on with others. Every other setting,
batch size and layout among them, may change between two starts, and one line tells which did.
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

_OF_ONE_START = ("run", "load", "resume")  # where a run lies and begins, which is not what it does
_PATHS = ("train", "valid", "tokenizer")  # of the group data
_ABSENT = object()


def data_identity(task: AnyTask, dataset: Samples[Any]) -> dict[str, Any]:
    """``Task.data_identity`` of the training data, which is the same on all ranks; each of them calls this.

    Raises:
        DataError: on every rank; ranks read different data, or the identity has values that JSON would change.
    """
    with agreed("the training data cannot be read"):
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
                    f"all ranks must read the same training data; from rank 0 to rank {number} differ "
                    f"{', '.join(different)}; put the files where every machine sees them"
                )
            )
    return identity


def check_ranks_have_one_recipe(config: RunConfig) -> None:
    """Compares the settings of all ranks, each of which calls this; paths of files may differ, as what they hold is
    compared when it is read.

    Ranks of other settings would wait for each other in other collectives.

    Raises:
        ConfigError: on every rank; it names what differs.
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
                    f"all ranks must be started with the same settings; from rank 0 to rank {number} differ "
                    f"{', '.join(different)}; start every rank with the same recipe and overrides"
                )
            )


def kept_settings(config: RunConfig) -> dict[str, Any]:
    """What a checkpoint keeps of the settings: the whole tree, but for where the run lies; every path is absolute."""
    tree = as_tree(with_absolute_paths(config))
    return {name: value for name, value in tree.items() if name not in _OF_ONE_START}


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """``config`` as it reads from any working folder."""
    data = {name: _absolute(getattr(config.data, name)) for name in _PATHS}
    update = {"data": config.data.model_copy(update=data), "load": _absolute(config.load), "run": _absolute(config.run)}
    return config.model_copy(update=update)


def comparable_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> Mapping[str, Any]:
    """``before``, of a checkpoint, in the words of this version, to be compared with the kept settings ``now``.

    A setting that the version of the checkpoint did not have is at its default. That version kept paths as they were
    given: one that leads to the path of ``now`` from today's working folder is the same.
    """
    try:
        tree = as_tree(load_run(before))
    except ConfigError:  # something in it is no setting any more: all that differs is told
        return before
    data, data_now = tree["data"], now["data"]
    same = {name: data_now[name] for name in _PATHS if _absolute(data.get(name)) == data_now.get(name)}
    return {**{name: tree[name] for name in tree if name not in _OF_ONE_START}, "data": {**data, **same}}


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """``name before -> now`` of every value that differs, of nested ones by dotted names."""
    return [f"{name} {_said(old)} -> {_said(new)}" for name, old, new in _pairs(before, now) if old != new]


def compared(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The names that have a value in both, which is not null: where one is silent there is nothing to compare."""
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
    """A path, a URL or None, or a mapping to them."""
    if isinstance(location, Mapping):
        return {name: _absolute(each) for name, each in location.items()}
    return location if location is None or "://" in location else os.path.abspath(location)
