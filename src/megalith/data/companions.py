"""What stands beside the tokenizer.json of a model folder of Hugging Face, of its tokenizer and of generation.

These files go through a run as they are, from the folder that it begins from to the one that is exported of it, so that
a chat model keeps its templates and its settings of sampling. A model whose tokenizer is not known has
generation_config.json alone, which names the ids of its tokens.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from megalith.data.tokenizer import Tokenizer
from megalith.errors import CheckpointError
from megalith.storage import LocalStore, Store

__all__ = [
    "GENERATION",
    "companions_without_beginning",
    "companions_without_tokenizer",
    "end_field",
    "read_companions",
    "token_ids",
    "written_companions",
]

log = logging.getLogger(__name__)

GENERATION = "generation_config.json"
_TOKENIZER = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
_TEMPLATES = "additional_chat_templates"  # a folder: NAME.jinja for each template besides the usual one
_JSON = (_TOKENIZER, "special_tokens_map.json", GENERATION)
_END = "eos_token_id"
_IDS = ("bos_token_id", "pad_token_id", "decoder_start_token_id")
_MOST_IDS = 1 << 31
_MOST_BYTES = 1 << 24  # of a file; the added tokens of a large tokenizer_config.json have about 1 MB
_MOST_TEMPLATES = 64  # with names; published models have up to five, of a few kB
_OF_CODE = "auto_map"  # names files of Python, which do not travel


def read_companions(store: Store) -> dict[str, bytes]:
    """The content of each of these files that the folder has, by name: ``additional_chat_templates/rag.jinja``.

    Raises:
        CheckpointError: one is too large, no UTF-8 text, no JSON object where it must be one, or a link to a file
            elsewhere, whose content nobody meant to hand on; or there are too many templates.
        StorageError: one is no regular file.
    """
    present = store.names()
    found = {name: _text(store, store, name) for name in (*_JSON, _TEMPLATE) if name in present}
    for name in found.keys() - {_TEMPLATE}:
        try:
            tree = json.loads(found[name])
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{store / name} is not JSON: {error}") from error
        if not isinstance(tree, dict):
            raise CheckpointError(f"{store / name} must hold a JSON object; it holds a {type(tree).__name__}")
    return found | (_named_templates(store) if _TEMPLATES in present else {})


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

    ``model_max_length`` of a tokenizer_config.json that is kept stays what its author set, often not the number of
    positions: 10^30, or what a service takes. Where it is less than ``num_positions``, a line says what follows.

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
    longest = given.get("model_max_length")
    if isinstance(longest, int | float) and longest < num_positions:
        log.info(
            "the exported %s keeps a model_max_length of %s tokens, and rows of the run have %d: transformers warns of "
            "longer texts, and cuts them there with truncation=True; raise it if the model is to read them",
            _TOKENIZER,
            longest,
            num_positions,
        )
    written = {**kept, _TOKENIZER: _json(given or usual)}
    if ids:
        written[GENERATION] = _json({**_tree(kept, GENERATION), **ids})
    return written


def companions_without_tokenizer(
    kept: Mapping[str, bytes], fields: Mapping[str, Any], ends: Sequence[int], vocab_size: int
) -> dict[str, bytes]:
    """What is kept where the tokenizer is not known: generation_config.json, with the ids of tokens that a model has.

    Args:
        kept: ``read_companions`` of the folder that the model comes from.
        fields: of its config.json, whose ids count where generation_config.json has none.
        ends: ids of the tokens that end a text.
        vocab_size: ids from it on are left out, and so is what is no id.
    """
    generation = _tree(kept, GENERATION)
    ids: dict[str, Any] = {
        name: id
        for name in _IDS
        for id in (fields.get(name), generation.get(name))  # the latter counts
        if type(id) is int and 0 <= id < vocab_size
    }
    if inside := [id for id in ends if 0 <= id < vocab_size]:
        ids[_END] = end_field(inside)
    others = {name: value for name, value in generation.items() if name not in (*_IDS, _END)}
    return {GENERATION: _json(others | ids)} if others or ids else {}


def token_ids(kept: Mapping[str, bytes]) -> dict[str, Any]:
    """The ids of tokens that generation_config.json of ``kept`` names, as it has them; without what is no id."""
    tree = _tree(kept, GENERATION)
    ends = tree.get(_END)
    found = {name: tree[name] for name in _IDS if _are_ids([tree.get(name)])}
    return found | ({_END: ends} if _are_ids(ends if isinstance(ends, list) else [ends]) and ends != [] else {})


def end_field(ends: Sequence[int]) -> int | list[int]:
    """``ends`` as the field ``eos_token_id`` has them."""
    return ends[0] if len(ends) == 1 else list(ends)


def _are_ids(given: Sequence[Any]) -> bool:
    return all(type(id) is int and 0 <= id < _MOST_IDS for id in given)


def _named_templates(store: Store) -> dict[str, bytes]:
    folder = store / _TEMPLATES
    files = [file for file in folder.names() if file.endswith(".jinja")]
    if unprintable := [file for file in files if not file.isprintable()]:
        raise CheckpointError(f"{folder} holds a template with a name that cannot be printed: {unprintable[0]!r:.200}")
    num_bytes = sum(map(folder.size, files[:_MOST_TEMPLATES]))
    if len(files) > _MOST_TEMPLATES or num_bytes > _MOST_BYTES:
        raise CheckpointError(
            f"{folder} holds {len(files):,} templates of {num_bytes:,} bytes or more, and at most {_MOST_TEMPLATES} of "
            f"{_MOST_BYTES:,} bytes in all are read"
        )
    return {f"{_TEMPLATES}/{file}": _text(store, folder, file) for file in files}


def _text(root: Store, folder: Store, name: str) -> bytes:
    """The file ``name`` of ``folder``, which is in ``root`` or is it. Raises as ``read_companions``."""
    path = folder / name
    if (size := folder.size(name)) > _MOST_BYTES:
        raise CheckpointError(f"{path} has {size:,} bytes, and at most {_MOST_BYTES:,} are read")
    if isinstance(root, LocalStore) and isinstance(path, LocalStore):
        inside, target = root.path.resolve(), path.path.resolve()
        # in the cache of huggingface_hub, every file of snapshots/REVISION is a link into blobs
        blobs = [inside.parent.parent / "blobs"] if inside.parent.name == "snapshots" else []
        if not any(map(target.is_relative_to, (inside, *blobs))):
            raise CheckpointError(f"{path} must be a file of its own folder; it is a link to {target}; copy that here")
    content = folder.read(name, 0, size)
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} must be UTF-8 text; {error}") from error
    return content


def _tree(kept: Mapping[str, bytes], name: str) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(kept.get(name, b"{}"))
    return tree


def _json(tree: Mapping[str, Any]) -> bytes:
    return (json.dumps(tree, indent=2) + "\n").encode()
