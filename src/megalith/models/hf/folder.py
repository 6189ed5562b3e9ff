"""A Hugging Face model folder: config.json, and one safetensors file, or several with an index.

A folder of sentence-transformers also says how embeddings follow from hidden states (``sentence_modules.py``).
From generation_config.json, if present, the tokens that end a text are read; its sampling settings are passed on to an
exported folder (``data/companions.py``).

Only safetensors files are read: a ``.bin`` file is a pickle, which can run arbitrary code. Opening a folder reads the
headers of its files and checks all of them against the config; tensor data is read on demand, and only the requested
box of each tensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.checkpoint.index import Piece, StoredTensor
from megalith.checkpoint.shard_header import DTYPES, ShardEntry, read_header
from megalith.checkpoint.stored_tensors import StoredTensors
from megalith.config import TransformerConfig
from megalith.data.companions import GENERATION, companions_without_tokenizer, read_companions
from megalith.data.tokenizer import Tokenizer
from megalith.errors import CheckpointError, StorageError
from megalith.models.hf.families import detect
from megalith.models.hf.family import Family
from megalith.models.hf.json_file import read_json
from megalith.models.hf.parameters import buffer_shapes, state_shapes
from megalith.models.hf.sentence_modules import DENSE, MODULES, SentenceModules, is_sentence_model, read_modules
from megalith.storage import MANIFEST, Store, open_store

__all__ = [
    "CONFIG",
    "INDEX",
    "TOKENIZER",
    "WHOLE",
    "ModelFolder",
    "companions_alone",
    "end_tokens",
    "is_model_folder",
    "open_folder",
    "read_folder",
]

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_BLOCK = 8 << 20  # bytes of a tensor compared at a time
_ROWS = 4096  # rows of a table compared at a time
_USUAL_POSITIONS = 2048  # LlamaConfig's default
_WEIGHTS = {name: torch_name for torch_name, name in DTYPES.items() if name in ("F64", "F32", "BF16", "F16")}


@dataclass(frozen=True)
class ModelFolder:
    """A folder whose config.json our model can represent and whose tensors match it.

    Attributes:
        store: the folder.
        hf_config: the contents of config.json.
        end_tokens: ids of the tokens that end a text: ``eos_token_id`` of config.json, then any others of
            generation_config.json, which is what transformers uses. Chat models have several.
        weights: our parameters and buffers by name, which can be read box by box.
        modules: those of sentence-transformers after an encoder; None without ``modules.json``.
        unread: keys of tensors that an embedding does not depend on, and that are not read.
    """

    store: Store
    hf_config: Mapping[str, Any]
    family: Family
    config: TransformerConfig
    weights: StoredTensors
    end_tokens: tuple[int, ...]
    modules: SentenceModules | None = None
    unread: tuple[str, ...] = ()

    @property
    def architecture(self) -> str:
        """The name of the transformers class."""
        return self.family.architecture

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of a classifier's classes, in order; empty if config.json has none, or only LABEL_0 and so on."""
        named = self.hf_config.get("id2label")
        if self.config.bert is None or self.config.bert.num_classes is None or not isinstance(named, dict):
            return ()
        numbers = range(len(named))
        names = tuple(name for number in numbers if isinstance(name := named.get(str(number)), str))
        return names if len(names) == len(named) and names != tuple(f"LABEL_{number}" for number in numbers) else ()

    @property
    def num_positions(self) -> int:
        """[tokens] The length that the model was trained on."""
        given = self.config.max_position_embeddings or self.hf_config.get("max_position_embeddings")
        return given if type(given) is int and given > 0 else _USUAL_POSITIONS

    @property
    def notes(self) -> tuple[str, ...]:
        """What to log when the model is taken from here: what is assumed, what is not read, and what is not done."""
        notes = [] if self.modules is None else [*self.modules.notes]
        if self.family.embeds and self.modules is None:
            notes.append(
                f"{self.store} has no {MODULES}, which says how a {self.architecture} embeds a text, so its embeddings "
                "are the default ones, normalized means over all tokens; to change that when you train it, set "
                "model.bert.embedding_pooling, normalize_embeddings or embedding_size"
            )
        if self.unread:
            notes.append(
                f"{len(self.unread)} tensors of {self.store} are not read, because no embedding depends on them: "
                f"{', '.join(self.unread):.200}"
            )
        return tuple(notes)

    def tokenizer(self, eod: str | int | None = None) -> Tokenizer | None:
        """Loads tokenizer.json, if present. ``eod``: as in ``Tokenizer``; by default the first of ``end_tokens``.

        Raises DataError if it cannot be read, or has no such token.
        """
        if TOKENIZER not in self.store.names():
            return None
        first = next(iter(self.end_tokens), None)  # the others end the turns of a conversation
        end_of_document = eod if eod is not None else first
        return Tokenizer.beside(self.store / CONFIG, TOKENIZER, end_of_document, ends=self.end_tokens)

    def companions(self) -> dict[str, bytes]:
        """Returns the files that accompany tokenizer.json, or ``companions_alone``. Raises as ``read_companions``."""
        if TOKENIZER in self.store.names():
            return read_companions(self.store)
        return companions_alone(self.store, self.config.vocab_size or 0)


def is_model_folder(store: Store) -> bool:
    """Whether ``store`` looks like a Hugging Face model rather than a Megalith checkpoint."""
    names = store.names()
    return CONFIG in names and MANIFEST not in names


def open_folder(location: str | Path | Store) -> ModelFolder:
    """Opens the model in the folder ``location``, checking everything but the values of its tensors.

    Raises CheckpointError if a file is missing, damaged or a pickle, or if tensors and config do not match;
    ConfigError if our model cannot represent the config.
    """
    store = open_store(location)
    hf_config = read_json(store, CONFIG)
    family = detect(hf_config, embeds=is_sentence_model(store))
    config = family.config_from_hf(hf_config)  # rejects an unsupported config before reading all headers
    has_modules = family.embeds and MODULES in store.names()
    modules = read_modules(store, config.hidden_size) if has_modules else None
    files = _headers(store)
    if modules is not None and modules.dense is not None:
        files |= _headers_of_dense(store, modules.dense)
    file_of = {key: file for file, entries in files.items() for key in entries}
    entries = {key: entry for file in files.values() for key, entry in file.items()}
    config = family.config_from_hf(hf_config, entries)
    config = config if modules is None else modules.of(config)
    keys = family.tensors_of({key: entry.shape for key, entry in entries.items()}, config)
    places = {name: (file_of[key], entries[key]) for name, key in keys.items()}
    if wrong := [f"{name} is {entry.dtype}" for name, (_, entry) in places.items() if entry.dtype not in _WEIGHTS]:
        raise CheckpointError(
            f"the tensors of {store} must have one of the dtypes {', '.join(_WEIGHTS)}; {', '.join(wrong[:8])}; save "
            "the model again in one of these"
        )
    for copy, original in family.copies(config).items():
        if copy in places and not _equal(store, places[copy], places[original]):
            raise family.not_a_copy(copy, original)
    for table, key in family.tables_in(entries).items():
        _check_table(store, family, config, table, file_of[key], entries[key])
    weights = _weights(store, family, config, places)
    ends = _end_tokens(store, hf_config, config.vocab_size or 0)
    return ModelFolder(store, hf_config, family, config, weights, ends, modules, family.unread_in(entries))


def read_folder(location: str | Path | Store) -> tuple[TransformerConfig, dict[str, Tensor]]:
    """Reads the config and our full state dict, on the CPU in the dtype of the files. Raises as ``open_folder``."""
    folder = open_folder(location)
    return folder.config, {name: folder.weights.read(name) for name in folder.weights.tensors}


def end_tokens(store: Store, vocab_size: int) -> tuple[int, ...]:
    """Returns ``ModelFolder.end_tokens`` without opening the folder. Raises CheckpointError for damaged files."""
    return _end_tokens(store, read_json(store, CONFIG), vocab_size)


def companions_alone(store: Store, vocab_size: int) -> dict[str, bytes]:
    """Returns what a run without a tokenizer keeps of a folder: generation settings, and the ids that end a text.

    Raises as ``read_companions``, or CheckpointError if config.json is damaged.
    """
    fields = read_json(store, CONFIG)
    ends = _end_tokens(store, fields, vocab_size)
    return companions_without_tokenizer(read_companions(store), fields, ends, vocab_size)


def _end_tokens(store: Store, hf_config: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Returns the ids that are integers and, after the first one, within a vocabulary of ``vocab_size``."""
    found: list[Any] = []
    for fields in (hf_config, read_json(store, GENERATION) if GENERATION in store.names() else {}):
        given = fields.get("eos_token_id")
        found += given if isinstance(given, list) else [given]
    ids = [end for end in found if type(end) is int]
    return tuple(dict.fromkeys([*ids[:1], *(end for end in ids[1:] if 0 <= end < vocab_size)]))


def _weights(
    store: Store, family: Family, config: TransformerConfig, places: Mapping[str, tuple[str, ShardEntry]]
) -> StoredTensors:
    """Maps our tensors to pieces of the files' tensors; ``places`` are (file, entry) by full key."""
    pieces: dict[str, list[Piece]] = {}
    dtypes: dict[str, set[str]] = {}
    entries: dict[str, dict[str, ShardEntry]] = {}
    for full_key, packed in family.packed(config).items():
        file, entry = places[full_key]
        for part, box in packed.boxes():
            num_leading = len(part.index)
            dims = (*range(num_leading), *(num_leading + d for d in packed.order))
            # the same bytes, described with a separate dimension for each of ours
            entries.setdefault(file, {})[part.name] = replace(entry, shape=box.permuted(dims).shape)
            pieces.setdefault(part.parameter, []).append(Piece(file, part.name, box, dims))
            dtypes.setdefault(part.parameter, set()).add(entry.dtype)
    if mixed := [f"{name} has {', '.join(sorted(found))}" for name, found in dtypes.items() if len(found) > 1]:
        raise CheckpointError(f"all experts of a layer in {store} must have the same dtype; {'; '.join(mixed[:8])}")
    index = {
        name: StoredTensor(shape, _WEIGHTS[next(iter(dtypes[name]))], tuple(pieces[name]))
        for name, shape in state_shapes(config).items()
    }
    return StoredTensors(store, index, entries, frozenset(buffer_shapes(config)))


def _headers(store: Store) -> dict[str, dict[str, ShardEntry]]:
    """Reads the tensor entries of each file of the model; no name occurs twice."""
    names = store.names()
    if WHOLE in names:
        return {WHOLE: _header(store, WHOLE)}
    if INDEX in names:
        return _shard_headers(store, read_json(store, INDEX).get("weight_map"))
    pickles = [name for name in names if name.endswith(".bin")]
    if pickles:
        raise CheckpointError(
            f"{store} must contain {WHOLE} or {INDEX}; it contains {', '.join(pickles)}, but pickle files are never "
            f"read; if you trust the model, load it with transformers and save it again with save_pretrained"
        )
    raise CheckpointError(f"{store} must contain {WHOLE} or {INDEX}; it contains neither")


def _headers_of_dense(store: Store, folder: str) -> dict[str, dict[str, ShardEntry]]:
    """Reads the tensor entries of the projection in ``folder``, with the keys that our tables have for them."""
    return {
        f"{folder}/{file}": {f"{DENSE}/{key}": entry for key, entry in entries.items()}
        for file, entries in _headers(store / folder).items()
    }


def _shard_headers(store: Store, shard_of: Any) -> dict[str, dict[str, ShardEntry]]:
    """Reads the headers of all shards; ``shard_of`` is the index's map from tensor names to files."""
    if not isinstance(shard_of, dict) or not all(isinstance(file, str) for file in shard_of.values()):
        raise CheckpointError(f"{store / INDEX} must have a weight_map from tensor names to file names; it does not")
    listed: dict[str, set[str]] = {}
    for name, file in shard_of.items():
        listed.setdefault(file, set()).add(name)
    headers: dict[str, dict[str, ShardEntry]] = {}
    for shard in sorted(listed):
        # an untrusted index must not reach outside its folder
        if Path(shard).name != shard:
            raise CheckpointError(f"{store / INDEX} must only name files in its own folder; it names {shard!r}")
        headers[shard] = _header(store, shard)
        if wrong := sorted(listed[shard] ^ headers[shard].keys()):
            raise CheckpointError(
                f"{store / shard} and {INDEX} must list the same tensors; only one of them has: {', '.join(wrong[:8])}"
            )
    return headers


def _header(store: Store, file: str) -> dict[str, ShardEntry]:
    try:
        return read_header(store, file)
    except StorageError as error:
        raise CheckpointError(str(error)) from error
    except CheckpointError as error:
        raise CheckpointError(f"{store / file} cannot be read as safetensors: {error}") from error


def _check_table(
    store: Store, family: Family, config: TransformerConfig, key: str, file: str, entry: ShardEntry
) -> None:
    """Raises CheckpointError unless the tensor ``key`` of ``family.tables`` has the expected values."""
    if entry.dtype not in _WEIGHTS or len(entry.shape) != 2 or entry.shape[1] != config.kv_channels:
        raise CheckpointError(
            f"{key} must be [positions, {config.kv_channels}] in one of {', '.join(_WEIGHTS)}; it is "
            f"{list(entry.shape)} in {entry.dtype}"
        )
    dtype = getattr(torch, _WEIGHTS[entry.dtype])
    num_rows, bytes_of_row = entry.shape[0], config.kv_channels * dtype.itemsize
    for first in range(0, num_rows, _ROWS):
        begin = entry.begin + first * bytes_of_row
        content = bytearray(store.read(file, begin, begin + min(_ROWS, num_rows - first) * bytes_of_row))
        family.check_table(key, torch.frombuffer(content, dtype=dtype).view(-1, config.kv_channels), first, config)


def _equal(store: Store, one: tuple[str, ShardEntry], other: tuple[str, ShardEntry]) -> bool:
    """Whether two tensors of the same shape, given as (file, entry), have the same dtype and bytes."""
    (file, entry), (other_file, other_entry) = one, other
    if entry.dtype != other_entry.dtype:
        return False
    for start in range(0, entry.end - entry.begin, _BLOCK):
        stop = min(start + _BLOCK, entry.end - entry.begin)
        content = store.read(file, entry.begin + start, entry.begin + stop)
        if content != store.read(other_file, other_entry.begin + start, other_entry.begin + stop):
            return False
    return True
