"""The base of whole models: built on meta, made real, initialised, counted."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import nn

from megalith.acceleration.recompute import DiscardableOutput
from megalith.parallel.parameters import (
    DeclaringModule,
    declared_buffers,
    declared_parameters,
    initialize_parameters_,
    refill_buffers_,
)
from megalith.transformer.attention import SelfAttention
from megalith.transformer.cross_attention import CrossAttention
from megalith.transformer.dot_product_attention import DotProductAttention
from megalith.transformer.dropout import DropoutSite, name_dropout_sites_
from megalith.transformer.mlp import MLP
from megalith.transformer.moe.moe_layer import MoELayer
from megalith.transformer.moe.router import TopKRouter
from megalith.transformer.moe.shared_experts import SharedExpertMLP
from megalith.transformer.multi_latent_attention import MLASelfAttention

__all__ = ["ModelModule"]

# names of Megatron's --recompute-modules, where it has one
_RECOMPUTABLE: Mapping[str, tuple[type[nn.Module], ...]] = MappingProxyType(
    {
        "core_attn": (DotProductAttention,),
        "self_attn": (SelfAttention, MLASelfAttention),
        "cross_attn": (CrossAttention,),
        "mlp": (MLP,),
        "moe": (MoELayer,),
        "shared_experts": (SharedExpertMLP,),
    }
)


class ModelModule(DeclaringModule, ABC):
    """A model whose every parameter and buffer is declared.

    Built under ``torch.device("meta")`` it takes no memory; it is then sharded, and ``materialize`` allocates this
    rank's shard only. Every subclass's ``__init__`` ends with ``self.finish(seed)``.

    Attributes:
        head_names: the modules at its end that serve one purpose only; another of the same kind may have others.
    """

    head_names: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def layers(self) -> list[nn.Module]:
        """The layers, in their order: what is recomputed and compiled one at a time, from outside."""

    def fsdp_units(self) -> list[nn.Module]:
        """What FSDP2 gathers one at a time, from the inside out; the rest of the model is a unit by itself."""
        return [unit for layer in self.layers() for unit in (*_with_experts(layer), layer)]

    def routers(self) -> Mapping[int, TopKRouter]:
        """The routers of this stage, by the global index of their layer."""
        return {module.layer: module for module in self.modules() if isinstance(module, TopKRouter)}

    def shared_weights(self) -> list[nn.Parameter]:
        """Parameters that other stages hold, too, under the same names: their gradients are summed."""
        return []

    def copied_weights(self) -> list[nn.Parameter]:
        """Those of the shared weights that count in an earlier stage, wherever elements of the model are counted."""
        return []

    def recomputable(self) -> Mapping[str, list[nn.Module]]:
        """The modules of the layers that each name of ``train.recompute_modules`` stands for, without names of none.

        Of a ``DiscardableOutput`` the output can be discarded; other modules keep their inputs alone.
        """
        found: dict[str, list[nn.Module]] = {}
        for module in (module for layer in self.layers() for module in layer.modules()):
            names = [name for name, kind in _RECOMPUTABLE.items() if isinstance(module, kind)]
            if isinstance(module, DiscardableOutput):
                names.append(module.operation)
            for name in names:
                found.setdefault(name, []).append(module)
        return found

    def drops(self) -> bool:
        """Whether anything in the model is dropped in training."""
        return any(module.p > 0.0 for module in self.modules() if isinstance(module, DropoutSite))

    def finish(self, seed: int) -> None:
        """Called at the end of a model's constructor: checks declarations, names dropouts, and draws weights.

        On meta it draws none. Raises ShapeError for a parameter or buffer that nobody declared.
        """
        parameters = [parameter for _, parameter, _ in declared_parameters(self)]
        list(declared_buffers(self))
        name_dropout_sites_(self)
        if not any(parameter.is_meta for parameter in parameters):
            self.initialize_weights(seed)

    def materialize(self, device: torch.device | str, seed: int) -> None:
        """Allocates this rank's part of a model built on meta, on ``device``, and gives it its first values."""
        self.to_empty(device=device)
        refill_buffers_(self)
        self.initialize_weights(seed)

    def initialize_weights(self, seed: int) -> None:
        """Draws every weight anew: the same numbers for the same ``seed``, however the model is split."""
        initialize_parameters_(self, seed)

    def num_parameters(self) -> int:
        """Number of parameters over all ranks, of the model or the stage that this is; tied ones once."""
        return sum(parameter.numel() for _, parameter, _ in declared_parameters(self))


def _with_experts(layer: nn.Module) -> list[nn.Module]:
    """The modules of ``layer`` whose weights are those of experts, which are sharded over other ranks."""
    declaring = [module for module in layer.modules() if isinstance(module, DeclaringModule)]
    return [module for module in declaring if any(spec.family == "expert" for spec in module.parameter_specs.values())]
