"""Whether a run may go on from a checkpoint: what has changed since, and what of it would repeat or skip text.

A run's position in its data is one number, the samples consumed. It means the same text as long as the data, the tokens
of a sample and the seed are the same: these are compared, and a run does not go on with others. Every other setting,
batch size and layout among them, may change between two starts, and one line tells which did.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from megalith.config import RunConfig, as_tree
from megalith.data.samples import Samples
from megalith.errors import DataError
from megalith.storage import shown
from megalith.topology.agreement import agreed, all_gather, everywhere
from megalith.training.tasks.task import AnyTask

__all__ = ["changed", "compared", "data_identity", "kept_settings"]

_OF_ONE_START = ("run", "load", "resume")  # where a run lies and begins, which is not what it does
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


def kept_settings(config: RunConfig) -> dict[str, Any]:
    """What a checkpoint keeps of the settings: the whole tree, but for where the run lies."""
    return {name: value for name, value in as_tree(config).items() if name not in _OF_ONE_START}


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
