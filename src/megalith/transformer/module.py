"""The base class of models: construction on meta, allocation, initialization, and what is sharded and recomputed."""

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

# the names of Megatron's --recompute-modules, where Megatron has the same
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
    """A model whose parameters and buffers are all declared.

    Under ``torch.device("meta")`` construction takes no memory; after sharding, ``materialize`` allocates this rank's
    shard only. Every subclass's ``__init__`` must end with ``self.finish(seed)``.

    Attributes:
        head_names: task-specific modules at the end of the model; other models of the same kind may have others.
    """

    head_names: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def layers(self) -> list[nn.Module]:
        """The layers in order; recomputation and compilation are applied to them one at a time, from outside."""

    def fsdp_units(self) -> list[nn.Module]:
        """The modules that FSDP2 gathers separately, inner ones first; the rest of the model is one more unit."""
        return [unit for layer in self.layers() for unit in (*_with_experts(layer), layer)]

    def routers(self) -> Mapping[int, TopKRouter]:
        """The routers of this stage, by global layer index."""
        return {module.layer: module for module in self.modules() if isinstance(module, TopKRouter)}

    def shared_weights(self) -> list[nn.Parameter]:
        """Parameters that other stages also hold, under the same names; their gradients are summed."""
        return []

    def copied_weights(self) -> list[nn.Parameter]:
        """The shared weights that are counted with an earlier stage wherever elements of the model are counted."""
        return []

    def recomputable(self) -> Mapping[str, list[nn.Module]]:
        """The modules in the layers for each name of ``train.recompute_modules``; names without modules are left out.

        A ``DiscardableOutput`` can discard its output; other modules keep only their inputs.
        """
        found: dict[str, list[nn.Module]] = {}
        for module in (module for layer in self.layers() for module in layer.modules()):
            names = [name for name, kind in _RECOMPUTABLE.items() if isinstance(module, kind)]
            if "shared_experts" in names:
                names.remove("mlp")  # they are an MLP too, and a part of "moe"
            if isinstance(module, DiscardableOutput):
                names.append(module.operation)
            for name in names:
                found.setdefault(name, []).append(module)
        return found

    def drops(self) -> bool:
        """Whether the model has dropout in training."""
        return any(module.p > 0.0 for module in self.modules() if isinstance(module, DropoutSite))

    def finish(self, seed: int) -> None:
        """Completes a model's constructor: checks declarations, names dropout sites and, if not on meta, draws weights.

        Raises ShapeError for an undeclared parameter or buffer.
        """
        parameters = [parameter for _, parameter, _ in declared_parameters(self)]
        list(declared_buffers(self))
        name_dropout_sites_(self)
        if not any(parameter.is_meta for parameter in parameters):
            self.initialize_weights(seed)

    def materialize(self, device: torch.device | str, seed: int) -> None:
        """Allocates this rank's part of a model built on meta, on ``device``, and initializes it."""
        self.to_empty(device=device)
        refill_buffers_(self)
        self.initialize_weights(seed)

    def initialize_weights(self, seed: int) -> None:
        """Initializes all weights; values depend on ``seed``, but not on how the model is split."""
        initialize_parameters_(self, seed)

    def num_parameters(self) -> int:
        """Number of parameters of this model or stage over all ranks; tied ones count once."""
        return sum(parameter.numel() for _, parameter, _ in declared_parameters(self))


def _with_experts(layer: nn.Module) -> list[nn.Module]:
    """The modules of ``layer`` with expert weights, which are sharded over different ranks than dense ones."""
    declaring = [module for module in layer.modules() if isinstance(module, DeclaringModule)]
    return [module for module in declaring if any(spec.family == "expert" for spec in module.parameter_specs.values())]
