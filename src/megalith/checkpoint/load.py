"""Loads tensors into any layout: each rank reads the overlaps of its boxes with the saved ones."""

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.checkpoint.box import local_part
from megalith.checkpoint.index import INDEX, StoredTensor, parse_index
from megalith.checkpoint.save import MOST_STATE_BYTES, STATE
from megalith.checkpoint.stored_tensors import StoredTensors
from megalith.checkpoint.verify import read_verified, verify_checkpoint
from megalith.errors import CheckpointError
from megalith.storage import WAY_OUT, Store, open_store, read_manifest, shown
from megalith.topology.agreement import agreed, all_gather, everywhere

__all__ = ["load_stored", "load_tensors", "open_tensors", "read_state"]

_NEAREST_FOR = 8  # difflib compares with every name: tens of milliseconds each in a large model


def load_tensors(
    location: str | Path | Store,
    into: Mapping[str, Tensor],
    *,
    only: Callable[[str], bool] | None = None,
    cast: bool = False,
    verify: bool = True,
) -> None:
    """Fills the tensors ``into`` in place from the checkpoint ``location``; all ranks of the default group call it.

    Strict: the union of names over all ranks must equal the stored names, and shapes and dtypes must match; otherwise
    nothing is changed.

    Args:
        into: by name; DTensors of any layout (Shard and Replicate), or plain tensors, which are filled whole.
        only: which stored names to consider; ``lambda name: name.startswith("model.")`` skips the optimizer's.
        cast: allow filling floating-point tensors from stored ones of another floating dtype, rounding to nearest.
        verify: False if the caller has just called ``verify_checkpoint``.

    Raises:
        CheckpointError: the checkpoint is damaged or does not match; one error listing every name, on every rank.
    """
    store = open_store(location)
    if verify:
        verify_checkpoint(store)
    with agreed(f"{store} cannot be loaded"):
        stored = open_tensors(store, only)
    load_stored(stored, into, cast=cast)


def open_tensors(store: Store, only: Callable[[str], bool] | None = None) -> StoredTensors:
    """Returns the tensors of the checkpoint ``store`` accepted by ``only``, to be read box by box; not collective.

    Raises:
        CheckpointError: the index is damaged.
    """
    index = parse_index(read_verified(store, INDEX))
    return StoredTensors(store, {name: tensor for name, tensor in index.items() if only is None or only(name)})


def load_stored(stored: StoredTensors, into: Mapping[str, Tensor], *, cast: bool = False) -> None:
    """``load_tensors`` for already opened tensors, whatever folder they are in."""
    with agreed(f"{stored.store} cannot be loaded"):
        parts = {name: local_part(name, tensor) for name, tensor in into.items()}
        misfit = _misfit(stored.tensors, into, cast)
    _refuse(stored.store, all_gather(misfit), stored.tensors)
    with agreed(f"{stored.store} cannot be loaded"):
        stored.fill(parts)


def read_state(location: str | Path | Store) -> dict[str, Any]:
    """Returns the state saved with the checkpoint ``location``; all ranks call it.

    Raises:
        CheckpointError: on any rank, the file is damaged, missing, too large, or not a JSON object.
    """
    store = open_store(location)
    with agreed():
        path = store / STATE
        record = read_manifest(store).get(STATE)
        if record is not None and record.bytes > MOST_STATE_BYTES:
            raise CheckpointError(f"{path} may have at most {MOST_STATE_BYTES} bytes; it has {record.bytes}; {WAY_OUT}")
        content = read_verified(store, STATE)
        try:
            state = json.loads(content.decode("utf-8"))  # given bytes, json would accept UTF-16 too
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is not valid JSON in UTF-8: {error}; {WAY_OUT}") from error
        if not isinstance(state, dict):
            raise CheckpointError(f"{path} must be a JSON object; got {shown(state)}; {WAY_OUT}")
    return state


@dataclass(frozen=True)
class _Misfit:
    """Names requested but not stored, names stored but not requested, and problems with those in both."""

    missing: set[str]
    unexpected: set[str]
    wrong: dict[str, str] = field(default_factory=dict)


def _misfit(stored: Mapping[str, StoredTensor], into: Mapping[str, Tensor], cast: bool) -> _Misfit:
    misfit = _Misfit(into.keys() - stored.keys(), stored.keys() - into.keys())
    for name in into.keys() & stored.keys():
        shape, dtype = tuple(into[name].shape), into[name].dtype
        saved_shape, saved_dtype = stored[name].shape, getattr(torch, stored[name].dtype)
        castable = cast and dtype.is_floating_point and saved_dtype.is_floating_point
        if shape != saved_shape:
            misfit.wrong[name] = f"expected shape {list(shape)}, but the checkpoint has {list(saved_shape)}"
        elif dtype != saved_dtype and not castable:
            misfit.wrong[name] = f"expected {dtype}, but the checkpoint has {saved_dtype}"
    return misfit


def _refuse(store: Store, misfits: list[_Misfit], stored: Iterable[str]) -> None:
    """Raises one CheckpointError that lists every mismatch of every rank, if there is any."""
    missing = set[str]().union(*(misfit.missing for misfit in misfits))
    # a stored tensor is unexpected only if no rank requests it
    unexpected = set.intersection(*(misfit.unexpected for misfit in misfits))
    wrong = {name: text for misfit in misfits for name, text in misfit.wrong.items()}
    if not (missing or unexpected or wrong):
        return
    nearest = {name: difflib.get_close_matches(name, stored, n=1) for name in sorted(missing)[:_NEAREST_FOR]}
    lines = []
    for name in sorted(missing):
        hint = f" (closest name in the checkpoint: {nearest[name][0]})" if nearest.get(name) else ""
        lines.append(f"missing: {name}{hint}")
    lines += [f"unexpected: {name}" for name in sorted(unexpected)]
    lines += [f"{name}: {wrong[name]}" for name in sorted(wrong)]
    raise everywhere(
        CheckpointError(
            f"{store} does not match the tensors to load, and nothing was loaded:\n  "
            + "\n  ".join(lines)
            + "\nif it was saved by a model of a different shape or dtype, use the settings of the run that saved it"
        )
    )
