"""Mixture-of-experts fields of config.json, and our settings for them, that several families share.

``router_aux_loss_coef`` and ``output_router_logits`` are not read: they concern a training loss that transformers
computes from the load over all layers together, and ``model.moe.router`` from that of each layer.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megalith.config import TransformerConfig
from megalith.config.layer_pattern import shortest_pattern
from megalith.models.hf.fields import Fields
from megalith.models.hf.layer_types import MOST_LAYERS
from megalith.models.hf.parameters import left_open

__all__ = ["allowed_of_experts", "read_expert_layers", "write_expert_layers"]

# only used in training, so not a property of the model
_OF_TRAINING = ("jitter", "sequence_balance", "micro_batch_balance", "global_balance", "z_loss")
_NONE: Mapping[str, tuple[Any, ...]] = MappingProxyType({"moe": ("a mixture of experts",)})


def allowed_of_experts(config: TransformerConfig, *names: str) -> dict[str, tuple[Any, ...]]:
    """For ``require``: requires experts, and allows any sizes, training settings and values of ``names``."""
    if config.moe is None:
        return dict(_NONE)
    sizes = ("moe.num_experts", "moe.top_k", "moe.ffn_hidden_size")
    return left_open(config, *sizes, *(f"moe.router.{name}" for name in _OF_TRAINING), *names)


def read_expert_layers(fields: Fields) -> tuple[bool, ...] | None:
    """Returns ``model.moe.layers`` for ``decoder_sparse_step`` and ``mlp_only_layers``."""
    step, dense = fields.get("decoder_sparse_step", 1), fields.optional("mlp_only_layers", list) or []
    if step < 1 or any(type(index) is not int for index in dense):
        fields.refuse(
            "decoder_sparse_step must be at least 1, and mlp_only_layers must be a list of layer indices; got "
            f"{step} and {dense!r:.80}"
        )
        return None
    num_layers, without = min(fields["num_hidden_layers"], MOST_LAYERS), frozenset(dense)
    layers = tuple((index + 1) % step == 0 and index not in without for index in range(num_layers))
    if layers and not any(layers):
        fields.refuse("decoder_sparse_step and mlp_only_layers must leave at least one layer with experts")
        return None
    return shortest_pattern(layers)


def write_expert_layers(config: TransformerConfig) -> dict[str, Any]:
    """The inverse of ``read_expert_layers``."""
    assert config.moe is not None, "this family has experts"
    dense = [index for index in range(config.num_layers) if not config.moe.has_experts(index)]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}
