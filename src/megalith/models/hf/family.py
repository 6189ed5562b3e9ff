"""A family of models of Hugging Face as a table: its config.json and its tensors, both ways.

A new family is one more ``Family`` in ``families.py``. What is said of tensors is where each of ours lies in theirs
(``places.py``); whole state dicts, folders and exports all follow from that.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalith.config import TransformerConfig
from megalith.errors import CheckpointError
from megalith.models.hf.fields import Fields
from megalith.models.hf.parameters import Shape, check, parameter_shapes, require
from megalith.models.hf.places import Packed, Part, Place, parts_of

__all__ = ["HEAD", "Family"]

HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"


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
        separate_experts: in files each expert has tensors of its own, and ``place`` is asked for them one by one, under
            their usual names, as ``model.layers.0.mlp.experts.7.gate_proj.weight``.
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
    separate_experts: bool = True

    def config_from_hf(self, hf_config: Mapping[str, Any]) -> TransformerConfig:
        """The model that ``hf_config`` describes; absent fields have the defaults of transformers.

        Raises ConfigError naming every field that our model cannot represent, and every field that it does not know.
        """
        fields = Fields(hf_config, self.model_type, tuple(self.sizes))
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
        """Every tensor of theirs by key; a tied head is no tensor of its own."""
        found: dict[Place, list[Part]] = {}
        for name, shape in parameter_shapes(config).items():
            for part in parts_of(name, shape, self.separate_experts):
                found.setdefault(self.place(part.name), []).append(part)
        return {place.key: Packed(tuple(parts), place.dims) for place, parts in found.items()}

    def parameters_of(self, keys: Mapping[str, Shape], config: TransformerConfig) -> dict[str, str]:
        """The full key of each parameter among ``keys`` of a file or state dict, with their shapes -> the key there.

        Raises CheckpointError listing every tensor that is missing, unknown or of another shape. A tied head may be
        there or not; whether it is the embedding is for the caller to see.
        """
        self.require(config)
        self._require_tensors_of_experts(len(keys), config)
        missing_prefix = "" if any(key.startswith(self.prefix) for key in keys) else self.prefix
        full = {key if key == HEAD else missing_prefix + key: key for key in keys}
        found = {name: key for name, key in full.items() if not self.buffers.fullmatch(name)}
        wanted = {key: packed.shape for key, packed in self.packed(config).items()}
        if config.tie_word_embeddings and HEAD in found:
            wanted[HEAD] = wanted[self.tied_to]
        check({name: keys[key] for name, key in found.items()}, wanted, self.architecture)
        return found

    def _require_tensors_of_experts(self, num_tensors: int, config: TransformerConfig) -> None:
        """Raises CheckpointError before a number that somebody wrote into config.json becomes as many names."""
        if config.moe is None or not self.separate_experts:
            return
        num_experts = config.moe.num_experts * sum(map(config.moe.has_experts, range(config.num_layers)))
        if num_experts > num_tensors:
            raise CheckpointError(
                f"a {self.architecture} with {num_experts:,} experts in all layers must have a tensor for each of them "
                f"at least; there are {num_tensors:,}"
            )

    @property
    def tied_to(self) -> str:
        """The key of the embedding, which is the head where they are tied."""
        return self.place(_EMBEDDING).key

    def not_tied(self) -> CheckpointError:
        """The error for a head that is not the embedding, in a model whose config says that it is."""
        return CheckpointError(
            f"{HEAD} must equal {self.tied_to} where tie_word_embeddings is true, and differs; set tie_word_embeddings "
            "to false to keep both"
        )

    def from_hf(self, state: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
        """Our state dict of theirs: the same tensors, copied where they lie there otherwise than as they are.

        Theirs has the keys of files, as ``save_pretrained`` writes them. Raises CheckpointError listing every tensor
        that is missing, unknown or of another shape, or if a tied head is not bitwise the embedding.
        """
        keys = self.parameters_of({key: tuple(tensor.shape) for key, tensor in state.items()}, config)
        tied = config.tie_word_embeddings and HEAD in keys
        if tied and not state[keys[HEAD]].equal(state[keys[self.tied_to]]):
            raise self.not_tied()
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
            for name, shape in parameter_shapes(config).items()
        }

    def to_hf(self, state: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
        """Their state dict of ours: the same tensors, copied where they lie there otherwise than as they are.

        A tied head is the embedding a second time, as ``load_state_dict`` wants it and a safetensors file does not.
        Raises CheckpointError listing every tensor that is missing, unknown or of another shape.
        """
        self.require(config)
        check({name: tuple(tensor.shape) for name, tensor in state.items()}, parameter_shapes(config), "the model")
        theirs: dict[str, Tensor] = {}
        for key, packed in self.packed(config).items():
            tensors = [state[part.parameter][part.index] for part in packed.parts]
            whole = tensors[0] if packed.is_parameter else torch.cat(tensors)
            theirs[key] = whole.permute(packed.order).contiguous().view(packed.shape)
        return theirs | {HEAD: theirs[self.tied_to]} if config.tie_word_embeddings else theirs
