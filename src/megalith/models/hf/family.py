"""A family of models of Hugging Face as a table: its config.json and its tensors, both ways.

A new family is one more ``Family`` in ``families.py``. What is said of tensors is where each of ours lies in theirs
(``places.py``); whole state dicts, folders and exports all follow from that.
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

__all__ = ["HEAD", "Family"]

HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_TABLE_ROUNDING = 1e-3  # angles in float32, which other programs take, are that far off some thousand tokens on


@dataclass(frozen=True)
class Family:
    """One architecture of transformers.

    Attributes:
        model_type, architecture: what config.json calls it, and the class.
        sizes: fields of config.json that are whole numbers and must be there -> our setting.
        fields: other fields that one of our settings has the value of -> that setting, and the default of their class
            or, where ours does, the type.
        read_rest: our settings that follow from other fields; it notes what our model cannot represent.
        write_rest: those other fields, for a model that was trained on rows of so many tokens.
        allowed: values of our settings that the architecture has, for those that it does not leave open.
        place: where a tensor of ours, by name, lies in theirs.
        buffers: keys in old files that are no parameters.
        prefix: what keys in files of the model without its head lack.
        head: the key of the output projection in their model; None of one without.
        aliases: keys of tensors that their model has a second time, by another name -> that name.
        renamed: how names of old files end -> how they end today.
        separate_experts: in files each expert has tensors of its own, and ``place`` is asked for them one by one, under
            their usual names, as ``model.layers.0.mlp.experts.7.gate_proj.weight``.
        has_config: whether a config.json of this architecture is of this family, where another one has it, too.
        written: what a folder has of a model: all of it, or it without a head that theirs lacks and that its logits do
            not depend on.
        tables: the keys of tensors of theirs that no training changes -> the rows of one at some positions [P], in
            float64. Files have them in float32, whatever dtype the parameters have.
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

    def config_from_hf(self, hf_config: Mapping[str, Any], keys: Collection[str] = ()) -> TransformerConfig:
        """The model that ``hf_config`` describes; absent fields have the defaults of transformers.

        ``keys`` are those of its tensors. Modules of multi-token prediction, which a config.json may name and the files
        lack, are those that ``keys`` have.

        Raises ConfigError naming every field that our model cannot represent, and every field that it does not know.
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
        """The config.json of ``config``, as transformers 4 and 5 read it.

        Args:
            max_position_embeddings: the length in tokens that the model was trained on; positions that are learned
                have their own.
            dtype: that of the tensors beside it, as ``"bfloat16"``.
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
            # the defaults of their classes are tokens of somebody else's vocabulary
            "bos_token_id": None,
            "eos_token_id": eos_token_id,
            "torch_dtype": dtype,
        }

    def require(self, config: TransformerConfig) -> None:
        """Raises ConfigError naming every setting of ``config`` that the architecture does not have."""
        require(self.architecture, config, **self.allowed(config))

    def packed(self, config: TransformerConfig) -> dict[str, Packed]:
        """Every tensor of theirs by key; one of ``copies`` is no tensor of its own."""
        found: dict[Place, list[Part]] = {}
        for name, shape in state_shapes(config).items():
            for part in parts_of(name, shape, self.separate_experts):
                found.setdefault(self.place(part.name), []).append(part)
        return {place.key: Packed(tuple(parts), place.dims) for place, parts in found.items()}

    def copies(self, config: TransformerConfig) -> dict[str, str]:
        """The keys of tensors that files may hold a second time -> the key of what they must equal.

        A tied head is one; the embedding and the head that modules of multi-token prediction share with the model are
        others.
        """
        tied = config.tie_word_embeddings
        found = self._aliases_of(config)
        for layer in range(config.num_layers, num_layers_in_all(config)):
            found[f"model.layers.{layer}.embed_tokens.weight"] = self.tied_to
            found[f"model.layers.{layer}.shared_head.head.weight"] = self.tied_to if tied else HEAD
        return found

    def tensors_of(self, keys: Mapping[str, Shape], config: TransformerConfig) -> dict[str, str]:
        """The full key of each tensor of the model among ``keys`` of files, with their shapes -> the key there.

        Raises CheckpointError listing every tensor that is missing, unknown or of another shape. ``copies`` may be
        there or not; whether they are equal is for the caller to see.
        """
        self.require(config)
        self._require_as_many_tensors(len(keys), config)
        missing_prefix = "" if any(key.startswith(self.prefix) for key in keys) else self.prefix
        full = {key if key == self.head else missing_prefix + self._today(key): key for key in keys}
        found = {name: key for name, key in full.items() if not (self.buffers.fullmatch(name) or name in self.tables)}
        wanted = {key: packed.shape for key, packed in self.packed(config).items()}
        wanted |= {copy: wanted[original] for copy, original in self.copies(config).items() if copy in found}
        check({name: keys[key] for name, key in found.items()}, wanted, self.architecture)
        return found

    def _require_as_many_tensors(self, num_tensors: int, config: TransformerConfig) -> None:
        """Raises CheckpointError before a number that somebody wrote into config.json becomes as many names."""
        least = {"layers": config.num_layers}
        if config.moe is not None and self.separate_experts:
            with_experts = sum(map(config.moe.has_experts, range(config.num_layers)))
            least["experts in all layers"] = config.moe.num_experts * with_experts
        for what, number in least.items():
            if number > num_tensors:
                raise CheckpointError(
                    f"a {self.architecture} with {number:,} {what} must have a tensor for each of them at least; there "
                    f"are {num_tensors:,}; is config.json that of these files?"
                )

    def check_table(self, key: str, rows: Tensor, first: int, config: TransformerConfig) -> None:
        """Raises CheckpointError unless ``rows`` of one of ``tables``, those from ``first`` on, are what they must be.

        They may be rounded to their dtype.
        """
        want = self.tables[key](config, torch.arange(first, first + len(rows)))
        rounding = max(torch.finfo(rows.dtype).eps, _TABLE_ROUNDING)
        if rows.shape != want.shape or not ((rows - want).abs() <= rounding).all():  # NaN is none of them
            raise CheckpointError(
                f"{key} differs from what {self.architecture} computes for rows of width {want.shape[-1]} from "
                f"position {first} on; our model computes it, and cannot have another"
            )

    def tables_of(self, config: TransformerConfig, num_positions: int) -> dict[str, Tensor]:
        """``tables`` by key, for so many positions, as files have them."""
        return {key: rows(config, torch.arange(num_positions)).float() for key, rows in self.tables.items()}

    def _aliases_of(self, config: TransformerConfig) -> dict[str, str]:
        """The keys of tensors that their model has twice -> the key of the other: a tied head, above all."""
        if self.head is None or not config.tie_word_embeddings:
            return dict(self.aliases)
        return {self.head: self.tied_to, **self.aliases}

    def _today(self, key: str) -> str:
        ending = next((old for old in self.renamed if key.endswith(old)), None)
        return key if ending is None else key.removesuffix(ending) + self.renamed[ending]

    @property
    def tied_to(self) -> str:
        """The key of the embedding, which is the head where they are tied."""
        return self.place(_EMBEDDING).key

    def not_a_copy(self, copy: str, original: str) -> CheckpointError:
        """The error for one of ``copies`` that is not equal."""
        if copy in self.aliases:
            return CheckpointError(f"{copy} must equal {original}, which it is another name of, and differs")
        if copy == self.head:
            return CheckpointError(
                f"{copy} must equal {original} where tie_word_embeddings is true, and differs; set tie_word_embeddings "
                "to false to keep both"
            )
        return CheckpointError(
            f"{copy} must equal {original}, which our modules of multi-token prediction share with the model, and "
            f"differs; take the tensors of that layer out of the files to import the model without it"
        )

    def from_hf(self, state: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
        """Our state dict of theirs: the same tensors, copied where they lie there otherwise than as they are.

        Theirs has the keys of files, as ``save_pretrained`` writes them. Raises CheckpointError listing every tensor
        that is missing, unknown or of another shape, or if one of ``copies`` is not bitwise equal, or one of ``tables``
        has other values.
        """
        keys = self.tensors_of({key: tuple(tensor.shape) for key, tensor in state.items()}, config)
        for copy, original in self.copies(config).items():
            if copy in keys and not state[keys[copy]].equal(state[keys[original]]):
                raise self.not_a_copy(copy, original)
        for key in self.tables.keys() & state.keys():
            self.check_table(key, state[key], 0, config)
        as_they_are: set[str] = set()
        views: dict[str, list[Tensor]] = {}
        for key, packed in self.packed(config).items():
            for part, view in packed.views(state[keys[key]]):
                views.setdefault(part.parameter, []).append(view)
                if packed.is_parameter:
                    as_they_are.add(part.parameter)
        # others are copied, so that no two share memory
        return {
            name: views[name][0] if name in as_they_are else torch.stack(views[name]).view(shape)
            for name, shape in state_shapes(config).items()
        }

    def to_hf(self, state: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
        """Their state dict of ours: the same tensors, copied where they lie there otherwise than as they are.

        A tied head is the embedding a second time, as ``load_state_dict`` wants it and a safetensors file does not.
        Without ``tables_of``, which follow from the number of positions.
        Raises CheckpointError listing every tensor that is missing, unknown or of another shape.
        """
        self.require(config)
        check({name: tuple(tensor.shape) for name, tensor in state.items()}, state_shapes(config), "the model")
        theirs: dict[str, Tensor] = {}
        for key, packed in self.packed(config).items():
            tensors = [state[part.parameter][part.index] for part in packed.parts]
            whole = tensors[0] if packed.is_parameter else torch.cat(tensors)
            theirs[key] = whole.permute(packed.order).contiguous().view(packed.shape)
        return theirs | {alias: theirs[original] for alias, original in self._aliases_of(config).items()}
