"""Writes a model as a folder that transformers can load: config.json, tensors one at a time, and the tokenizer."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.checkpoint.shard_file import write_shard
from megalith.checkpoint.stored_tensors import StoredTensors
from megalith.data.tokenizer import Tokenizer
from megalith.models.hf.folder import CONFIG, INDEX, TOKENIZER, WHOLE
from megalith.models.hf.places import Packed
from megalith.storage import LocalStore, Store, explained

__all__ = ["write_tensors", "write_tokenizer"]

_MOST_BYTES = 5 * 10**9  # of tensors per file, unless a single one is larger; long the default of transformers


def write_tensors(
    store: Store,
    hf_config: Mapping[str, Any],
    packed: Mapping[str, Packed],
    weights: StoredTensors,
    dtypes: Mapping[str, torch.dtype],
    tables: Mapping[str, Tensor],
    progress: Callable[[int, int], None],
) -> None:
    """Writes config.json and the tensors ``packed`` by key, assembled from our ``weights`` however these are sharded.

    A key with a slash names a folder, which must exist, and the key in a file there: ``2_Dense/linear.weight``.
    ``dtypes`` are the dtypes of the tensors, by the same keys. Only one tensor is in memory at a time, in addition to
    ``tables``, which are written unchanged. ``progress`` is called with (bytes written so far, total bytes).

    Raises:
        StorageError: writing to ``store`` fails.
        CheckpointError: ``weights`` do not match their index.
    """
    described = {key: torch.empty(tensor.shape, dtype=dtypes[key], device="meta") for key, tensor in packed.items()}
    described |= tables
    total, done = sum(map(_num_bytes, described.values())), 0

    def read(key: str) -> Tensor:
        nonlocal done
        progress(done, total)
        done += _num_bytes(described[key])
        if key in tables:
            return tables[key]
        tensor = torch.empty(packed[key].shape, dtype=dtypes[key])
        for part, view in packed[key].views(tensor):
            weights.fill({part.parameter: (part.box, view.view(part.box.shape))})
        return tensor

    of_folders: dict[str, dict[str, str]] = {}
    for key in described:
        inner, _, name = key.rpartition("/")
        of_folders.setdefault(inner, {})[name] = key
    groups = _groups({key: described[key] for key in of_folders.pop("").values()})
    files = [WHOLE] if len(groups) == 1 else [_shard_name(number, len(groups)) for number in range(len(groups))]
    for file, keys in zip(files, groups, strict=True):
        write_shard(store, file, {key: described[key] for key in keys}, read)
    for inner, names in of_folders.items():
        _write_inner(store / inner, names, described, read)
    progress(total, total)
    if len(groups) > 1:
        weight_map = {key: file for file, keys in zip(files, groups, strict=True) for key in keys}
        size = sum(_num_bytes(described[key]) for key in weight_map)
        store.put(INDEX, _json({"metadata": {"total_size": size}, "weight_map": weight_map}))
    store.put(CONFIG, _json(hf_config))


def write_tokenizer(folder: Path, tokenizer: Tokenizer | None, companions: Mapping[str, bytes]) -> None:
    """Writes the files that ``AutoTokenizer`` needs to ``folder``; ``companions`` are its other files, by name.

    Raises StorageError.
    """
    if tokenizer is not None:
        tokenizer.save(folder / TOKENIZER)
    for name, content in companions.items():
        with explained("write", folder / name):
            (folder / name).parent.mkdir(exist_ok=True)
        LocalStore(folder).put(name, content)


def _write_inner(
    store: Store, keys: Mapping[str, str], described: Mapping[str, Tensor], read: Callable[[str], Tensor]
) -> None:
    """Writes a file with some tensors into the folder ``store``; ``keys``: their names there -> their keys."""
    write_shard(store, WHOLE, {name: described[key] for name, key in keys.items()}, lambda name: read(keys[name]))


def _groups(described: Mapping[str, Tensor]) -> list[list[str]]:
    """Returns the tensor keys of each file."""
    groups: list[list[str]] = [[]]
    size = 0
    for key, tensor in described.items():
        if groups[-1] and size + _num_bytes(tensor) > _MOST_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(key)
        size += _num_bytes(tensor)
    return groups


def _shard_name(number: int, count: int) -> str:
    return f"model-{number + 1:05}-of-{count:05}.safetensors"


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _json(tree: Mapping[str, Any]) -> bytes:
    return (json.dumps(tree, indent=2) + "\n").encode()
