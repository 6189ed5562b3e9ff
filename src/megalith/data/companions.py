"""What stands beside the tokenizer.json of a model folder of Hugging Face, of its tokenizer and of generation.

These files go through a run as they are, from the folder that it begins from to the one that is exported of it, so that
a chat model keeps its template and its settings of sampling.
"""

import json
from collections.abc import Mapping
from typing import Any

from megalith.data.tokenizer import Tokenizer
from megalith.errors import CheckpointError
from megalith.storage import Store

__all__ = ["GENERATION", "companions_without_beginning", "read_companions", "written_companions"]

GENERATION = "generation_config.json"
_TOKENIZER = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
_JSON = (_TOKENIZER, "special_tokens_map.json", GENERATION)
_MOST_BYTES = 1 << 24  # of a file; the added tokens of a large tokenizer_config.json have about 1 MB
_OF_CODE = "auto_map"  # names files of Python, which do not travel


def read_companions(store: Store) -> dict[str, bytes]:
    """The content of each of these files that the folder has, by name.

    Raises CheckpointError for one that is too large, no text, or no JSON object.
    """
    found = {}
    for name in set(store.names()) & {*_JSON, _TEMPLATE}:
        if (size := store.size(name)) > _MOST_BYTES:
            raise CheckpointError(f"{store / name} has {size:,} bytes, and at most {_MOST_BYTES:,} are read")
        found[name] = store.read(name)
        try:
            tree = {} if name == _TEMPLATE else json.loads(found[name].decode())
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{store / name} is not JSON: {error}") from error
        if not isinstance(tree, dict):
            raise CheckpointError(f"{store / name} must hold a JSON object; it holds a {type(tree).__name__}")
    return found


def companions_without_beginning(kept: Mapping[str, bytes]) -> dict[str, bytes]:
    """``kept``, for a tokenizer that puts nothing in front of a text.

    Llama's and Gemma's classes in transformers put a token there, whatever tokenizer.json says, unless they are told.
    """
    tree = _tree(kept, _TOKENIZER)
    return {**kept, _TOKENIZER: _json({**tree, "add_bos_token": False})} if tree else {**kept}


def written_companions(
    kept: Mapping[str, bytes],
    tokenizer: Tokenizer,
    num_positions: int,
    special: Mapping[str, str],
    ids: Mapping[str, Any],
) -> dict[str, bytes]:
    """What stands beside tokenizer.json in a folder that transformers loads, by name.

    Args:
        kept: ``read_companions`` of the folder that the model comes from; what they say is kept.
        num_positions: the length that the model was trained on.
        special: how the model's special tokens are spelled, by transformers' names.
        ids: what generation_config.json says of tokens; {} for a model that writes no text.
    """
    usual = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.eod_text,
        **special,
        "model_max_length": num_positions,
        "clean_up_tokenization_spaces": False,
    }
    given = {name: value for name, value in _tree(kept, _TOKENIZER).items() if name != _OF_CODE}
    written = {**kept, _TOKENIZER: _json(given or usual)}
    if ids:
        written[GENERATION] = _json({**_tree(kept, GENERATION), **ids})
    return written


def _tree(kept: Mapping[str, bytes], name: str) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(kept.get(name, b"{}"))
    return tree


def _json(tree: Mapping[str, Any]) -> bytes:
    return (json.dumps(tree, indent=2) + "\n").encode()
