"""The tokenizer, generation and text files beside the tokenizer.json of a Hugging Face model folder.

A run carries these files unchanged from the folder that it starts from to the one that is exported, so that a chat
model keeps its templates and sampling settings. A model whose tokenizer is not known has only generation_config.json,
which contains the ids of its special tokens.
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
    "LOWERCASE",
    "PROMPTS",
    "SENTENCE_MODEL",
    "SENTENCE_TRANSFORMER",
    "SIMILARITY",
    "TEMPLATE",
    "TOKENIZER_CONFIG",
    "TOOLS_TEMPLATE",
    "companions_without_beginning",
    "companions_without_tokenizer",
    "end_field",
    "read_companions",
    "sentence_companions",
    "token_ids",
    "written_companions",
]

log = logging.getLogger(__name__)

GENERATION = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
_TEMPLATES = "additional_chat_templates"  # a folder: NAME.jinja for each template besides the default
TOOLS_TEMPLATE = f"{_TEMPLATES}/tool_use.jinja"
# of sentence-transformers: how its Transformer module reads a text, and how the whole model is used
SENTENCE_TRANSFORMER = "sentence_bert_config.json"
SENTENCE_MODEL = "config_sentence_transformers.json"
LOWERCASE, PROMPTS, SIMILARITY = "do_lower_case", "prompts", "similarity_fn_name"
_LONGEST, _DEFAULT_PROMPT = "max_seq_length", "default_prompt_name"
_JSON = (TOKENIZER_CONFIG, "special_tokens_map.json", GENERATION, SENTENCE_TRANSFORMER, SENTENCE_MODEL)
_END = "eos_token_id"
_IDS = ("bos_token_id", "pad_token_id", "decoder_start_token_id")
_MOST_IDS = 1 << 31
_MOST_BYTES = 1 << 24  # per file; the added tokens in a large tokenizer_config.json take about 1 MB
_MOST_TEMPLATES = 64  # named templates; published models have up to five, of a few kB
_OF_CODE = "auto_map"  # refers to Python files, which are not copied


def read_companions(store: Store) -> dict[str, bytes]:
    """Reads those of these files that exist, by name, such as ``additional_chat_templates/rag.jinja``.

    Raises:
        CheckpointError: a file is too large, not UTF-8, not a JSON object although it should be, or a link to a file
            outside the folder, which could leak unrelated content; or there are too many templates.
        StorageError: one is not a regular file.
    """
    present = store.names()
    found = {name: _text(store, store, name) for name in (*_JSON, TEMPLATE) if name in present}
    for name in found.keys() - {TEMPLATE}:
        try:
            tree = json.loads(found[name])
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{store / name} is not JSON: {error}") from error
        if not isinstance(tree, dict):
            raise CheckpointError(f"{store / name} must hold a JSON object; it holds a {type(tree).__name__}")
    return found | (_named_templates(store) if _TEMPLATES in present else {})


def companions_without_beginning(kept: Mapping[str, bytes]) -> dict[str, bytes]:
    """``kept`` for a tokenizer that prepends nothing to a text.

    The Llama and Gemma tokenizer classes of transformers prepend BOS, whatever tokenizer.json says, unless
    ``add_bos_token`` is False.
    """
    tree = _tree(kept, TOKENIZER_CONFIG)
    return {**kept, TOKENIZER_CONFIG: _json({**tree, "add_bos_token": False})} if tree else {**kept}


def written_companions(
    kept: Mapping[str, bytes],
    tokenizer: Tokenizer,
    num_positions: int,
    fields: Mapping[str, Any],
    ids: Mapping[str, Any],
) -> dict[str, bytes]:
    """The files to write beside tokenizer.json in a folder that transformers loads, by name.

    An existing tokenizer_config.json keeps the ``model_max_length`` that its author set, which is often not the number
    of positions: 10^30, or the limit of a service. If it is less than ``num_positions``, the consequence is logged.

    Args:
        kept: ``read_companions`` of the folder that the model comes from; their content is kept.
        num_positions: the rows of the model's learned position table, or else the length it was trained on, in tokens.
        fields: of a new tokenizer_config.json, such as the text of the model's special tokens.
        ids: token ids for generation_config.json; {} for a model that does not generate text.
    """
    usual = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.eod_text,
        **fields,
        "model_max_length": num_positions,
        "clean_up_tokenization_spaces": False,
    }
    given = {name: value for name, value in _tree(kept, TOKENIZER_CONFIG).items() if name != _OF_CODE}
    longest = given.get("model_max_length")
    if isinstance(longest, int | float) and longest < num_positions:
        log.info(
            "the exported %s keeps model_max_length=%s, but the model has %d positions: transformers warns about "
            "longer texts, and truncates them with truncation=True; increase it if the model should read them",
            TOKENIZER_CONFIG,
            longest,
            num_positions,
        )
    written = {name: content for name, content in kept.items() if name not in (SENTENCE_TRANSFORMER, SENTENCE_MODEL)}
    written[TOKENIZER_CONFIG] = _json(given or usual)
    if ids:
        written[GENERATION] = _json({**_tree(kept, GENERATION), **ids})
    return written


def companions_without_tokenizer(
    kept: Mapping[str, bytes], fields: Mapping[str, Any], ends: Sequence[int], vocab_size: int
) -> dict[str, bytes]:
    """The files to write if the tokenizer is not known: generation_config.json, with the model's special token ids.

    Args:
        kept: ``read_companions`` of the folder that the model comes from.
        fields: the fields of its config.json, used for ids that generation_config.json does not have.
        ends: ids of the tokens that end a text.
        vocab_size: ids that are invalid or not below it are dropped.
    """
    generation = _tree(kept, GENERATION)
    ids: dict[str, Any] = {
        name: id
        for name in _IDS
        for id in (fields.get(name), generation.get(name))  # the latter takes precedence
        if type(id) is int and 0 <= id < vocab_size
    }
    if inside := [id for id in ends if 0 <= id < vocab_size]:
        ids[_END] = end_field(inside)
    others = {name: value for name, value in generation.items() if name not in (*_IDS, _END)}
    return {GENERATION: _json(others | ids)} if others or ids else {}


def sentence_companions(kept: Mapping[str, bytes], num_positions: int, similarity: str) -> dict[str, bytes]:
    """The two files for sentence-transformers: how long a text may be, prompts in front of it, and the similarity.

    ``max_seq_length``, ``do_lower_case`` and prompts are kept; other fields may name code that is not exported.

    Args:
        kept: ``read_companions`` of the folder that the model comes from.
        num_positions: as in ``written_companions``, for a model without a length of its author.
        similarity: the measure of the embeddings that the model was trained with, ``"cosine"`` or ``"dot"``.
    """
    texts, model = _tree(kept, SENTENCE_TRANSFORMER), _tree(kept, SENTENCE_MODEL)
    longest, prompts, default = texts.get(_LONGEST), model.get(PROMPTS), model.get(_DEFAULT_PROMPT)
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        prompts = {}
    reads = {
        _LONGEST: longest if type(longest) is int and 0 < longest <= num_positions else num_positions,
        LOWERCASE: texts.get(LOWERCASE) is True,
    }
    uses = {
        "model_type": "SentenceTransformer",
        PROMPTS: prompts,
        _DEFAULT_PROMPT: default if isinstance(default, str) and default in prompts else None,
        SIMILARITY: similarity,
    }
    return {SENTENCE_TRANSFORMER: _json(reads), SENTENCE_MODEL: _json(uses)}


def token_ids(kept: Mapping[str, bytes]) -> dict[str, Any]:
    """The token id fields of the generation_config.json in ``kept``, unchanged, without invalid ones."""
    tree = _tree(kept, GENERATION)
    ends = tree.get(_END)
    found = {name: tree[name] for name in _IDS if _are_ids([tree.get(name)])}
    return found | ({_END: ends} if _are_ids(ends if isinstance(ends, list) else [ends]) and ends != [] else {})


def end_field(ends: Sequence[int]) -> int | list[int]:
    """``ends`` in the format of the field ``eos_token_id``: a number, or a list of several."""
    return ends[0] if len(ends) == 1 else list(ends)


def _are_ids(given: Sequence[Any]) -> bool:
    return all(type(id) is int and 0 <= id < _MOST_IDS for id in given)


def _named_templates(store: Store) -> dict[str, bytes]:
    folder = store / _TEMPLATES
    files = [file for file in folder.names() if file.endswith(".jinja")]
    if unprintable := [file for file in files if not file.isprintable()]:
        raise CheckpointError(f"{folder} has a template with an unprintable name: {unprintable[0]!r:.200}")
    num_bytes = sum(map(folder.size, files[:_MOST_TEMPLATES]))
    if len(files) > _MOST_TEMPLATES or num_bytes > _MOST_BYTES:
        raise CheckpointError(
            f"{folder} has {len(files):,} templates of at least {num_bytes:,} bytes in total; the limit is "
            f"{_MOST_TEMPLATES} templates of {_MOST_BYTES:,} bytes in total"
        )
    return {f"{_TEMPLATES}/{file}": _text(store, folder, file) for file in files}


def _text(root: Store, folder: Store, name: str) -> bytes:
    """Reads the file ``name`` in ``folder``, which is ``root`` or inside it. Raises as ``read_companions``."""
    path = folder / name
    if (size := folder.size(name)) > _MOST_BYTES:
        raise CheckpointError(f"{path} has {size:,} bytes; the limit is {_MOST_BYTES:,}")
    if isinstance(root, LocalStore) and isinstance(path, LocalStore):
        inside, target = root.path.resolve(), path.path.resolve()
        # in the cache of huggingface_hub, every file of snapshots/REVISION is a link into blobs
        blobs = [inside.parent.parent / "blobs"] if inside.parent.name == "snapshots" else []
        if not any(map(target.is_relative_to, (inside, *blobs))):
            raise CheckpointError(
                f"{path} must be a file in its own folder; it is a link to {target}; copy that file here"
            )
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
