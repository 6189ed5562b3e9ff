"""A Hugging Face model folder: config.json, and safetensors files, one or several with an index.

Only safetensors is read: a ``.bin`` is a pickle, and a pickle runs what its author wrote into it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from megalith.config import TransformerConfig
from megalith.errors import CheckpointError, ConfigError
from megalith.input_file import read_regular_file, regular_file_size
from megalith.models.hf import gpt2, llama

__all__ = ["detect", "read_folder"]

_ARCHITECTURES = {"llama": llama, "gpt2": gpt2}
_WHOLE = "model.safetensors"
_MOST_BYTES = 1 << 26  # of a .json file; the index of the largest models has about 10 MB
_INDEX = "model.safetensors.index.json"


def detect(hf_config: Mapping[str, Any]) -> ModuleType:
    """The module (``llama`` or ``gpt2``) for the ``model_type`` of a config.json. Raises ConfigError for any other."""
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _ARCHITECTURES:
        raise ConfigError(f"config.json must have a model_type of {', '.join(_ARCHITECTURES)}; got {model_type!r}")
    return _ARCHITECTURES[model_type]


def read_folder(path: str | Path) -> tuple[TransformerConfig, dict[str, Tensor]]:
    """The config and our state dict, on the CPU in the files' dtype, of the model in the folder ``path``.

    Raises CheckpointError if a file is missing, damaged or a pickle, or if tensors and config do not fit;
    ConfigError if our model cannot represent the config.
    """
    folder = Path(path)
    hf_config = _read_json(folder / "config.json")
    architecture = detect(hf_config)
    config: TransformerConfig = architecture.config_from_hf(hf_config)
    return config, architecture.from_hf(_read_tensors(folder), config)


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    if (folder / _WHOLE).exists():
        return _read_safetensors(folder / _WHOLE)
    if (folder / _INDEX).exists():
        return _read_shards(folder, _read_json(folder / _INDEX).get("weight_map"))
    if pickles := sorted(file.name for file in folder.glob("*.bin")):
        raise CheckpointError(
            f"{folder} must hold {_WHOLE} or {_INDEX}; it holds {', '.join(pickles)}, a pickle, which is never read; "
            f"where you trust it, save the model again with save_pretrained"
        )
    raise CheckpointError(f"{folder} must hold {_WHOLE} or {_INDEX}; it holds neither")


def _read_shards(folder: Path, shard_of: Any) -> dict[str, Tensor]:
    """The tensors of all shards; ``shard_of`` is the index's map from a tensor's name to the file that holds it."""
    if not isinstance(shard_of, dict) or not all(isinstance(file, str) for file in shard_of.values()):
        raise CheckpointError(f"{folder / _INDEX} must have a weight_map from names to files; it has none")
    state: dict[str, Tensor] = {}
    for shard in sorted(set(shard_of.values())):
        # an index that somebody else wrote must not reach outside of its folder
        if Path(shard).name != shard:
            raise CheckpointError(f"{folder / _INDEX} must name files of its own folder; it names {shard!r}")
        tensors = _read_safetensors(folder / shard)
        listed = {name for name, file in shard_of.items() if file == shard}
        if wrong := sorted(listed ^ tensors.keys()):
            raise CheckpointError(f"{folder / shard} and {_INDEX} must list the same tensors; only one has: {wrong}")
        state |= tensors
    return state


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    try:
        regular_file_size(file)  # or raises, where opening would wait
        return load_file(file)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{file} cannot be read as safetensors: {reason}") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        tree = json.loads(read_regular_file(file, _MOST_BYTES).decode("utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}; give the folder of a model") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    if not isinstance(tree, dict):
        raise CheckpointError(f"{file} must hold a JSON object; it holds a {type(tree).__name__}")
    return tree
