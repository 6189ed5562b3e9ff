"""A Hugging Face model family as a table: converts its config.json and its tensors in both directions.

To add a family, add a ``Family`` to ``families.py``. For tensors it only says where each of ours is stored in theirs
(``places.py``); the conversion of state dicts, folders and exports follows from that.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megalith.config import TransformerConfig
from megalith.errors import CheckpointError
from megalith.models.hf.fields import Fields
from megalith.models.hf.parameters import Shape, check, num_layers_in_all, require, state_shapes
from megalith.models.hf.places import Packed, Part, Place, parts_of

__all__ = ["HEAD", "NOTHING", "Family"]

HEAD = "lm_head.weight"
NOTHING = re.compile(r"(?!)")
_EMBEDDING = "model.embed_tokens.weight"
_TABLE_ROUNDING = 1e-3  # error of float32 angles, which other programs use, after some thousand tokens


@dataclass(frozen=True)
class Family:
    """One architecture of transformers.

    Attributes:
        model_type, architecture: ``model_type`` of config.json, and the name of the transformers class.
        sizes: required integer fields of config.json -> our setting.
        fields: other fields that correspond to one of our settings -> that setting, and the default of their class, or
            the field's type if an absent field means our default.
        read_rest: returns our settings that follow from other fields; records what our model cannot represent.
        write_rest: returns those other fields, for a model trained on rows of the given number of tokens.
        allowed: returns the values of our settings that the architecture supports, as ``require`` takes them.
        place: maps the name of one of our tensors to its place in theirs.
        buffers: keys in old files that are not parameters.
        prefix: key prefix that is missing in files saved from the model without its head.
        head: the key of the output projection in their model; None if it has none.
        aliases: keys under which their model has a tensor a second time -> the tensor's main key.
        renamed: endings of names in old files -> today's endings.
        separate_experts: whether files have separate tensors for each expert; ``place`` is then called for each, under
            its usual name, such as ``model.layers.0.mlp.experts.7.gate_proj.weight``.
        has_config: whether a config.json of this architecture belongs to this family, if families share it.
        written: maps a config to the part of the model that a folder stores: all of it, or all but a head that their
            model lacks and that the logits do not depend on.
        tables: keys of their constant tensors -> a function that computes the rows at positions [P], in float64. Files
            store them in float32, whatever the dtype of the parameters.
        embeds: whether it is a headless encoder, with modules of sentence-transformers after it (sentence_modules.py).
        outer_prefix: key prefix of its tensors in files saved from a model with a head, if it has none itself.
        unread: keys of parts that files may have, such as another head, but the model does not.
    """

    model_type: str
    architecture: str
    sizes: Mapping[str, str]
    fields: Mapping[str, tuple[str, Any]]
    read_rest: Callable[[Fields], Mapping[str, Any]]
    write_rest: Callable[[TransformerConfig, int], Mapping[str, Any]]
    allowed: Callable[[TransformerConfig], Mapping[str, tuple[Any, ...]]]
    place: Callable[[str], Place]
    buffers: re.Pattern[str]
    prefix: str = ""
    head: str | None = HEAD
    aliases: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    separate_experts: bool = True
    has_config: Callable[[Mapping[str, Any]], bool] = lambda hf_config: True
    written: Callable[[TransformerConfig], TransformerConfig] = lambda config: config
    tables: Mapping[str, Callable[[TransformerConfig, Tensor], Tensor]] = field(default_factory=dict)
    embeds: bool = False
    outer_prefix: str = ""
    unread: re.Pattern[str] = NOTHING

    def config_from_hf(self, hf_config: Mapping[str, Any], keys: Collection[str] = ()) -> TransformerConfig:
        """Returns the config of the model that ``hf_config`` describes; absent fields have transformers' defaults.

        ``keys`` are those of its tensors. They decide whether the model has multi-token prediction modules, which
        config.json may name even if the files lack them.

        Raises ConfigError naming every field that our model cannot represent, and every unknown field.
        """
        fields = Fields(hf_config, self.model_type, tuple(self.sizes), keys)
        settings: dict[str, Any] = {ours: fields[theirs] for theirs, ours in self.sizes.items()}
        for theirs, (ours, default) in self.fields.items():
            is_type = isinstance(default, type)
            settings[ours] = fields.optional(theirs, default) if is_type else fields.get(theirs, default)
        return fields.build(**settings, **self.read_rest(fields))

    def config_to_hf(
        self, config: TransformerConfig, *, max_position_embeddings: int, dtype: str, eos_token_id: int | None
    ) -> dict[str, Any]:
        """Returns the config.json for ``config``, which transformers 4 and 5 can read.

        Args:
            max_position_embeddings: the length in tokens that the model was trained on; learned positions use their own
                number instead.
            dtype: the dtype of the tensors, such as ``"bfloat16"``.
            eos_token_id: the token that ends a document.

        Raises:
            ConfigError: the architecture cannot represent ``config``.
        """
        self.require(config)
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **{theirs: getattr(config, ours) for theirs, ours in self.sizes.items()},
            **{theirs: getattr(config, ours) for theirs, (ours, _) in self.fields.items()},
            **self.write_rest(config, max_position_embeddings),
            # their class defaults are ids in another vocabulary
            "bos_token_id": None,
            "eos_token_id": eos_token_id,
            "torch_dtype": dtype,
        }

    def require(self, config: TransformerConfig) -> None:
        """Raises ConfigError naming every setting of ``config`` that the architecture does not support."""
        require(self.architecture, config, **self.allowed(config))

    def packed(self, config: TransformerConfig) -> dict[str, Packed]:
        """Returns every tensor of their model by key, without the duplicates in ``copies``."""
        found: dict[Place, list[Part]] = {}
        for name, shape in state_shapes(config).items():
            for part in parts_of(name, shape, self.separate_experts):
                found.setdefault(self.place(part.name), []).append(part)
        return {place.key: Packed(tuple(parts), place.dims) for place, parts in found.items()}

    def copies(self, config: TransformerConfig) -> dict[str, str]:
        """Returns the keys of duplicates that files may contain -> the key of the tensor that each must equal.

        These are ``aliases``, a tied head, and the embedding and head that multi-token prediction modules share with
        the model.
        """
        tied = config.tie_word_embeddings
        found = self._aliases_of(config)
        for layer in range(config.num_layers, num_layers_in_all(config)):
            found[f"model.layers.{layer}.embed_tokens.weight"] = self.tied_to
            found[f"model.layers.{layer}.shared_head.head.weight"] = self.tied_to if tied else HEAD
        return found

    def tensors_of(self, keys: Mapping[str, Shape], config: TransformerConfig) -> dict[str, str]:
        """Returns the full key of each of the model's tensors -> its key in files that have ``keys`` with these shapes.

        Raises CheckpointError listing tensors that are missing, unknown or of another shape. ``copies`` are optional;
        the caller must check that they are equal.
        """
        self.require(config)
        self._require_as_many_tensors(len(keys), config)
        full, no_parameters = self._full_keys(keys), {*self.tables_in(keys).values(), *self.unread_in(keys)}
        found = {name: key for name, key in full.items() if not (self.buffers.fullmatch(name) or key in no_parameters)}
        wanted = {key: packed.shape for key, packed in self.packed(config).items()}
        wanted |= {copy: wanted[original] for copy, original in self.copies(config).items() if copy in found}
        check({name: keys[key] for name, key in found.items()}, wanted, self.architecture)
        return found

    def tables_in(self, keys: Collection[str]) -> dict[str, str]:
        """Returns those of ``tables`` that are among the ``keys`` of files -> their key there."""
        return {name: key for name, key in self._full_keys(keys).items() if name in self.tables}

    def unread_in(self, keys: Collection[str]) -> tuple[str, ...]:
        """Returns the ``keys`` of files that belong to parts of another model (``unread``), in order."""
        return tuple(key for name, key in self._full_keys(keys).items() if self.unread.fullmatch(name))

    def _full_keys(self, keys: Collection[str]) -> dict[str, str]:
        """Returns today's key with the prefix, as in ``packed`` -> the key in files, for each of ``keys``."""
        missing_prefix = "" if any(key.startswith(self.prefix) for key in keys) else self.prefix
        outer = "" if self.tied_to in keys else self.outer_prefix
        return {key if key == self.head else missing_prefix + self._today(key.removeprefix(outer)): key for key in keys}

    def _require_as_many_tensors(self, num_tensors: int, config: TransformerConfig) -> None:
        """Raises CheckpointError before an implausible number in config.json is expanded into that many names."""
        least = {"layers": config.num_layers}
        if config.moe is not None and self.separate_experts:
            with_experts = sum(map(config.moe.has_experts, range(config.num_layers)))
            least["experts in total"] = config.moe.num_experts * with_experts
        for what, number in least.items():
            if number > num_tensors:
                raise CheckpointError(
                    f"a {self.architecture} with {number:,} {what} must have at least one tensor for each; found only "
                    f"{num_tensors:,}; does config.json belong to these files?"
                )

    def check_table(self, key: str, rows: Tensor, first: int, config: TransformerConfig) -> None:
        """Raises CheckpointError unless ``rows`` of one of ``tables``, from position ``first`` on, are correct.

        They may be rounded to their dtype.
        """
        want = self.tables[key](config, torch.arange(first, first + len(rows)))
        rounding = max(torch.finfo(rows.dtype).eps, _TABLE_ROUNDING)
        if rows.shape != want.shape or not ((rows - want).abs() <= rounding).all():  # false for NaN
            raise CheckpointError(
                f"{key} differs from the table of width {want.shape[-1]} that {self.architecture} computes, from "
                f"position {first} on; Megalith computes this table and cannot use a different one"
            )

    def tables_of(self, config: TransformerConfig, num_positions: int) -> dict[str, Tensor]:
        """Computes ``tables`` by key for ``num_positions`` positions, in the float32 of files."""
        return {key: rows(config, torch.arange(num_positions)).float() for key, rows in self.tables.items()}

    def _aliases_of(self, config: TransformerConfig) -> dict[str, str]:
        """Returns the keys of tensors that their model has twice, such as a tied head -> the main key."""
        if self.head is None or not config.tie_word_embeddings:
            return dict(self.aliases)
        return {self.head: self.tied_to, **self.aliases}

    def _today(self, key: str) -> str:
        ending = next((old for old in self.renamed if key.endswith(old)), None)
        return key if ending is None else key.removesuffix(ending) + self.renamed[ending]

    @property
    def tied_to(self) -> str:
        """The key of the embedding, which a tied head shares."""
        return self.place(_EMBEDDING).key

    def not_a_copy(self, copy: str, original: str) -> CheckpointError:
        """Returns the error for one of ``copies`` that differs from its original."""
        if copy in self.aliases:
            return CheckpointError(f"{copy} must equal {original}, of which it is an alias, but differs")
        if copy == self.head:
            return CheckpointError(
                f"{copy} must equal {original} if tie_word_embeddings is true, but differs; set tie_word_embeddings "
                "to false to keep both"
            )
        return CheckpointError(
            f"{copy} must equal {original}, which Megalith's multi-token prediction modules share with the model, but "
            f"differs; remove the tensors of that layer from the files to import the model without it"
        )

    def from_hf(self, state: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
        """Converts their state dict to ours; tensors are copied only where the layout differs.

        ``state`` has the keys of files, as ``save_pretrained`` writes them. Raises CheckpointError listing tensors that
        are missing, unknown or of another shape, or if one of ``copies`` is not bitwise equal, or one of ``tables`` has
        other values.
        """
        keys = self.tensors_of({key: tuple(tensor.shape) for key, tensor in state.items()}, config)
        for copy, original in self.copies(config).items():
            if copy in keys and not state[keys[copy]].equal(state[keys[original]]):
                raise self.not_a_copy(copy, original)
        for table, key in self.tables_in(state).items():
            self.check_table(table, state[key], 0, config)
        as_they_are: set[str] = set()
        views: dict[str, list[Tensor]] = {}
        for key, packed in self.packed(config).items():
            for part, view in packed.views(state[keys[key]]):
                views.setdefault(part.parameter, []).append(view)
                if packed.is_parameter:
                    as_they_are.add(part.parameter)
        # all others are copied, so that no two share memory
        return {
            name: views[name][0] if name in as_they_are else torch.stack(views[name]).view(shape)
            for name, shape in state_shapes(config).items()
        }

    def to_hf(self, state: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
        """Converts our state dict to theirs; tensors are copied only where the layout differs.

        A tied head is included as a second reference to the embedding, which ``load_state_dict`` needs and safetensors
        files do not allow. ``tables_of`` are not included, because they depend on the number of positions.
        Raises CheckpointError listing tensors that are missing, unknown or of another shape.
        """
        self.require(config)
        check({name: tuple(tensor.shape) for name, tensor in state.items()}, state_shapes(config), "the model")
        theirs: dict[str, Tensor] = {}
        for key, packed in self.packed(config).items():
            tensors = [state[part.parameter][part.index] for part in packed.parts]
            whole = tensors[0] if packed.is_parameter else torch.cat(tensors)
            theirs[key] = whole.permute(packed.order).contiguous().view(packed.shape)
        return theirs | {alias: theirs[original] for alias, original in self._aliases_of(config).items()}
