"""Reads the JSON files of a Hugging Face folder, which may be damaged or hostile: their size is limited."""

import json
from typing import Any

from megalith.errors import CheckpointError, StorageError
from megalith.storage import Store

__all__ = ["read_json", "read_json_list"]

# a .json file takes up to 26 times its size when parsed; the index of the largest models is about 10 MB
_MOST_BYTES = 1 << 24


def read_json(store: Store, name: str) -> dict[str, Any]:
    """Reads the JSON object in the file ``name``. Raises CheckpointError."""
    tree = _parsed(store, name)
    if not isinstance(tree, dict):
        raise CheckpointError(f"{store / name} must contain a JSON object; it contains a {type(tree).__name__}")
    return tree


def read_json_list(store: Store, name: str) -> list[Any]:
    """Reads the JSON list in the file ``name``. Raises CheckpointError."""
    tree = _parsed(store, name)
    if not isinstance(tree, list):
        raise CheckpointError(f"{store / name} must contain a JSON list; it contains a {type(tree).__name__}")
    return tree


def _parsed(store: Store, name: str) -> Any:
    path = store / name
    try:
        size = store.size(name)
        content = store.read(name, 0, min(size, _MOST_BYTES))
    except StorageError as error:
        raise CheckpointError(f"{error}; pass the path of a model folder") from error
    if size > _MOST_BYTES:
        raise CheckpointError(f"{path} has {size:,} bytes; the limit is {_MOST_BYTES:,}")
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
