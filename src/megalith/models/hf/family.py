"""A family of models of Hugging Face as a table: its config.json and its tensors, both ways.

A new family is one more ``Family`` in ``families.py``. What is said of tensors is where each of ours lies in theirs
(``Place``); whole state dicts, folders and exports all follow from that.
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

__all__ = ["HEAD", "Family", "Packed", "Place"]

HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Place:
    """The tensor of theirs, by its key, that holds one of ours, or its transpose.

    Tensors of ours that have the same key lie in it end to end, in the order of ``parameter_shapes``.
    """

    key: str
    transposed: bool = False


@dataclass(frozen=True)
class Packed:
    """A tensor of theirs: ours, by name with their shapes, end to end along dimension 0, then ``transposed``."""

    parts: Mapping[str, Shape]
    transposed: bool

    @property
    def shape(self) -> Shape:
        """The shape of their tensor."""
        first, *rest = self.parts.values()
        whole = (first[0] + sum(shape[0] for shape in rest), *first[1:])
        return whole[::-1] if self.transposed else whole

    def rows(self) -> dict[str, tuple[int, int]]:
        """Which rows of their tensor, transposed back, each of ours is: the first, and the one after the last."""
        found, start = {}, 0
        for name, shape in self.parts.items():
            found[name] = (start, start + shape[0])
            start += shape[0]
        return found

    def views(self, tensor: Tensor) -> dict[str, Tensor]:
        """Our tensors as views of theirs."""
        whole = tensor.t() if self.transposed else tensor
        return {name: whole[start:stop] for name, (start, stop) in self.rows().items()}


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
        parts: dict[Place, dict[str, Shape]] = {}
        for name, shape in parameter_shapes(config).items():
            parts.setdefault(self.place(name), {})[name] = shape
        return {place.key: Packed(shapes, place.transposed) for place, shapes in parts.items()}

    def parameters_of(self, keys: Mapping[str, Shape], config: TransformerConfig) -> dict[str, str]:
        """The full key of each parameter among ``keys`` of a file or state dict, with their shapes -> the key there.

        Raises CheckpointError listing every tensor that is missing, unknown or of another shape. A tied head may be
        there or not; whether it is the embedding is for the caller to see.
        """
        self.require(config)
        missing_prefix = "" if any(key.startswith(self.prefix) for key in keys) else self.prefix
        full = {key if key == HEAD else missing_prefix + key: key for key in keys}
        found = {name: key for name, key in full.items() if not self.buffers.fullmatch(name)}
        wanted = {key: packed.shape for key, packed in self.packed(config).items()}
        if config.tie_word_embeddings and HEAD in found:
            wanted[HEAD] = wanted[self.tied_to]
        check({name: keys[key] for name, key in found.items()}, wanted, self.architecture)
        return found

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
        """Our state dict of theirs: the same tensors, copied where they lie there transposed or packed.

        Raises CheckpointError listing every tensor that is missing, unknown or of another shape, or if a tied head is
        not bitwise the embedding.
        """
        keys = self.parameters_of({key: tuple(tensor.shape) for key, tensor in state.items()}, config)
        tied = config.tie_word_embeddings and HEAD in keys
        if tied and not state[keys[HEAD]].equal(state[keys[self.tied_to]]):
            raise self.not_tied()
        ours: dict[str, Tensor] = {}
        for key, packed in self.packed(config).items():
            views = packed.views(state[keys[key]])
            # copies, so that no two share memory
            shared = packed.transposed or len(views) > 1
            contiguous = torch.contiguous_format
            ours |= {name: view.clone(memory_format=contiguous) if shared else view for name, view in views.items()}
        return {name: ours[name] for name in parameter_shapes(config)}

    def to_hf(self, state: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
        """Their state dict of ours: the same tensors, copied where they lie there transposed or packed.

        A tied head is the embedding a second time, as ``load_state_dict`` wants it and a safetensors file does not.
        Raises CheckpointError listing every tensor that is missing, unknown or of another shape.
        """
        self.require(config)
        check({name: tuple(tensor.shape) for name, tensor in state.items()}, parameter_shapes(config), "the model")
        theirs: dict[str, Tensor] = {}
        for key, packed in self.packed(config).items():
            first, *rest = [state[name] for name in packed.parts]
            whole = torch.cat([first, *rest]) if rest else first
            theirs[key] = whole.t().contiguous() if packed.transposed else whole
        return theirs | {HEAD: theirs[self.tied_to]} if config.tie_word_embeddings else theirs
