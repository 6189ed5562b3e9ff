"""A Megatron-Core GPT checkpoint in ``torch_dist`` format, such as ``iter_0001000``, as a source of our parameters.

    .metadata      where each part of a tensor is stored       __0_0.distcp ...   the tensors
    common.pt      the training arguments, and more            metadata.json      the name of the format

All pickles are read as data. A checkpoint from any of Megatron's parallel layouts is read box by box.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, ClassVar

from megalith.checkpoint.box import Box, first_miscount
from megalith.checkpoint.index import Piece, StoredTensor
from megalith.checkpoint.shard_header import ShardEntry
from megalith.checkpoint.stored_tensors import StoredTensors
from megalith.config import TransformerConfig
from megalith.errors import CheckpointError, ConfigError, StorageError
from megalith.models.hf.parameters import Shape, parameter_shapes
from megalith.models.megatron.gpt import Rows, config_of, key_in_layer, source_of
from megalith.models.megatron.inert_pickle import Inert, origin_of
from megalith.models.megatron.torch_dist import METADATA, Chunk, ChunkedTensor, read_saved, read_tensors, rows_of
from megalith.storage import Store, open_store

__all__ = ["MegatronFolder", "is_megatron_folder", "open_megatron_folder"]

_FORMAT, _COMMON, _NEWEST = "metadata.json", "common.pt", "latest_checkpointed_iteration.txt"
_OPTIMIZER = "optimizer."
_USUAL_POSITIONS = 2048


@dataclass(frozen=True)
class MegatronFolder:
    """A checkpoint whose model ours can represent and whose tensors match it.

    Attributes:
        store: the folder.
        arguments: Megatron's training arguments, as pickled; classes among them are inert.
        weights: our parameters by name, which can be read box by box.
    """

    store: Store
    arguments: Mapping[str, Any]
    config: TransformerConfig
    weights: StoredTensors

    architecture: ClassVar[str] = "Megatron-Core GPT"
    class_names: ClassVar[tuple[str, ...]] = ()
    notes: ClassVar[tuple[str, ...]] = ()
    end_tokens: ClassVar[tuple[int, ...]] = ()  # only the tokenizer knows them

    @property
    def num_positions(self) -> int:
        """[tokens] The length that the model was trained on."""
        given = self.arguments.get("seq_length") or self.arguments.get("max_position_embeddings")
        return given if type(given) is int and given > 0 else _USUAL_POSITIONS

    def tokenizer(self, eod: str | int | None = None) -> None:
        """Returns None: Megatron stores its tokenizer elsewhere."""

    def companions(self) -> dict[str, bytes]:
        """Returns no files, as there is no tokenizer."""
        return {}


def is_megatron_folder(store: Store) -> bool:
    """Whether ``store`` looks like a ``torch_dist`` checkpoint of Megatron, or a folder of several."""
    names = store.names()
    return {METADATA, _COMMON} <= set(names) or _NEWEST in names


def open_megatron_folder(location: str | Path | Store) -> MegatronFolder:
    """Opens the checkpoint ``location``, or the newest in that folder, checking everything but its tensors' values.

    Raises:
        CheckpointError: a file is missing or damaged, or tensors and arguments do not match.
        ConfigError: our model cannot represent the one that the arguments describe.
    """
    store = open_store(location)
    try:
        if _NEWEST in store.names():
            store = store / _newest(store)
        _check_format(store)
        arguments = _arguments(store)
        theirs = {key: tensor for key, tensor in read_tensors(store).items() if not key.startswith(_OPTIMIZER)}
    except StorageError as error:
        raise CheckpointError(f"{error}; pass the folder of one iteration, iter_...") from error
    embedding = theirs.get("embedding.word_embeddings.weight")
    if embedding is None:
        raise CheckpointError(f"{store} has no embedding.word_embeddings.weight, so it is not a Megatron GPT")
    config = config_of(arguments, embedding.shape[0])
    wanted = _Collected(store, theirs, config)
    entries: dict[str, dict[str, ShardEntry]] = {}
    tensors = {name: wanted.tensor(name, shape, entries) for name, shape in parameter_shapes(config).items()}
    wanted.require_all_rows()
    if unread := sorted(theirs.keys() - wanted.rows_read.keys()):
        raise CheckpointError(
            f"{store} has tensors that a GPT with these arguments does not have: {', '.join(unread[:8])}"
        )
    return MegatronFolder(store, arguments, config, StoredTensors(store, tensors, entries))


class _Collected:
    """Tracks what is read from the tensors ``theirs``; ``rows_read``: the rows read in all layers, by key."""

    def __init__(self, store: Store, theirs: Mapping[str, ChunkedTensor], config: TransformerConfig) -> None:
        self.store, self.theirs, self.config = store, theirs, config
        self.rows_read = Counter[str]()
        self._elements: dict[tuple[Chunk, str], ShardEntry] = {}

    def tensor(self, name: str, shape: Shape, entries: dict[str, dict[str, ShardEntry]]) -> StoredTensor:
        """Returns our parameter ``name`` in pieces of theirs, and adds their bytes to ``entries``, by file and key."""
        key, layer, all_rows = source_of(name, self.config)
        full, stacked = self._found(key, layer)
        tensor, all_rows = self.theirs[full], all_rows or (Rows(0, shape[0], 0),)
        self.rows_read[full] += shape[0]
        pieces = []
        for chunk in tensor.chunks:
            slab = _Slab.of(chunk, layer if stacked else None, self._where(tensor, chunk))
            if slab is None:
                continue
            for rows in all_rows:
                if (part := slab.rows(rows)) is not None:
                    box, entry = part
                    piece_key = f"{name}@{entry.begin}"
                    entries.setdefault(chunk.file, {})[piece_key] = entry
                    pieces.append(Piece(chunk.file, piece_key, box))
        given = sum(piece.box.num_elements for piece in pieces)
        source_shape = tensor.shape[1:] if stacked else tensor.shape
        if given != prod(shape) or source_shape[1:] != shape[1:]:
            raise CheckpointError(
                f"{key} in {self.store} has shape {list(source_shape)}, which does not match {name} {list(shape)}"
            )
        if miscount := first_miscount(Box.whole(shape), (piece.box for piece in pieces)):
            element, count = miscount
            raise CheckpointError(
                f"{key} in {self.store} must have every element of {name} once; it has {list(element)} {count} times"
            )
        return StoredTensor(shape, tensor.dtype, tuple(pieces))

    def require_all_rows(self) -> None:
        """Raises CheckpointError for a tensor with rows that no parameter reads."""
        for key, num_rows in self.rows_read.items():
            shape = self.theirs[key].shape
            whole = prod(shape[:2]) if self._is_stack(key) else shape[0]
            if num_rows != whole:
                raise CheckpointError(
                    f"{key} in {self.store} must have {num_rows} rows in total according to the training arguments; "
                    f"its shape is {list(shape)}"
                )

    def _found(self, key: str, layer: int | None) -> tuple[str, bool]:
        """Returns the full key of their tensor, and whether it is a stack of all layers."""
        keys = [key] if layer is None else [key_in_layer(key), key_in_layer(key, layer)]
        for full in keys:
            if full in self.theirs:
                shape, stacked = self.theirs[full].shape, self._is_stack(full)
                if stacked and (not shape or shape[0] != self.config.num_layers):
                    raise CheckpointError(f"{full} must have {self.config.num_layers} layers; got shape {list(shape)}")
                return full, stacked
        raise CheckpointError(f"{self.store} has no tensor {' or '.join(keys)}")

    def _is_stack(self, full_key: str) -> bool:
        layers, _, rest = full_key.partition(key_in_layer(""))
        return not layers and not rest.partition(".")[0].isdigit()

    def _where(self, tensor: ChunkedTensor, chunk: Chunk) -> ShardEntry:
        key = chunk, tensor.dtype
        if key not in self._elements:
            self._elements[key] = rows_of(self.store, tensor, chunk)
        return self._elements[key]


@dataclass(frozen=True)
class _Slab:
    """The part of a chunk that belongs to one layer: its box, without the layer dimension, and its bytes."""

    box: Box
    entry: ShardEntry

    @classmethod
    def of(cls, chunk: Chunk, layer: int | None, entry: ShardEntry) -> "_Slab | None":
        """Returns None if the chunk has no part of ``layer``; with ``layer`` None, there is no layer dimension."""
        offsets, sizes, begin, end = chunk.offsets, chunk.sizes, entry.begin, entry.end
        if layer is not None:
            if not offsets[0] <= layer < offsets[0] + sizes[0]:
                return None
            num_bytes = (end - begin) // sizes[0]
            begin += (layer - offsets[0]) * num_bytes
            end, offsets, sizes = begin + num_bytes, offsets[1:], sizes[1:]
        box = Box(tuple((offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)))
        return cls(box, ShardEntry(entry.dtype, sizes, begin, end))

    def rows(self, rows: Rows) -> tuple[Box, ShardEntry] | None:
        """Returns the part in ``rows``: its box in our tensor, and its bytes, which are whole rows of the slab."""
        first, last = self.box.ranges[0]
        start, stop = max(first, rows.source), min(last, rows.source + rows.last - rows.first)
        if start >= stop:
            return None
        row_bytes = (self.entry.end - self.entry.begin) // (last - first)
        begin = self.entry.begin + (start - first) * row_bytes
        ours = rows.first + start - rows.source
        box = Box(((ours, ours + stop - start), *self.box.ranges[1:]))
        end = begin + (stop - start) * row_bytes
        return box, ShardEntry(self.entry.dtype, (stop - start, *self.entry.shape[1:]), begin, end)


def _newest(store: Store) -> str:
    """Returns the folder name of the newest iteration."""
    told = store.read(_NEWEST, 0, min(store.size(_NEWEST), 64)).strip()
    if not told.isdigit():
        raise CheckpointError(
            f"{store / _NEWEST} must contain the number of an iteration; it contains {told!r}; pass the folder of the "
            "checkpoint itself"
        )
    return f"iter_{int(told):07}"


def _check_format(store: Store) -> None:
    """Raises CheckpointError for Megatron's other formats."""
    if _FORMAT not in store.names():
        return
    try:
        described = json.loads(store.read(_FORMAT, 0, min(store.size(_FORMAT), 1 << 16)))
        backend = described["sharded_backend"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{store / _FORMAT} does not name the format of the checkpoint: {error!r}") from error
    if backend != "torch_dist":
        raise CheckpointError(f"{store} must be in Megatron's torch_dist format; it is in {str(backend)[:80]!r}")


def _arguments(store: Store) -> dict[str, Any]:
    """Reads Megatron's training arguments from common.pt."""
    common = read_saved(store, _COMMON)
    arguments = common.get("args") if isinstance(common, dict) else None
    if not isinstance(arguments, Inert) or origin_of(arguments) != "argparse.Namespace":
        raise ConfigError(
            f"{store / _COMMON} must contain Megatron's args, which describe the model; it has none; save the "
            "checkpoint with Megatron's own training script"
        )
    return arguments.fields()
