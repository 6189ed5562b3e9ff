"""The modules that each layer is built from, chosen by the layer's global index.

Experts, a window, another feed-forward or another attention change only the spec; the layer stays the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from megalith.config import TransformerConfig
from megalith.parallel.build_options import BuildOptions
from megalith.transformer.attention import SelfAttention
from megalith.transformer.mlp import MLP
from megalith.transformer.moe.moe_layer import MoELayer
from megalith.transformer.multi_latent_attention import MLASelfAttention
from megalith.transformer.normalization import Normalization

__all__ = ["LayerSpec", "LayerSpecs", "layer_specs"]

BuildPart = Callable[[TransformerConfig, BuildOptions], nn.Module]


@dataclass(frozen=True)
class LayerSpec:
    """The parts of one layer, each built from the model's settings and options.

    ``norm`` builds a ``Normalization``. ``attention``, ``feed_forward``, and optionally ``cross_attention`` between
    them, build modules that are called with (x [S, B, H], LayerContext) -> [S, B, H], both [S/tp, B, H] under sequence
    parallelism; for example ``functools.partial(SelfAttention, window=4096)``.
    """

    norm: Callable[[TransformerConfig, BuildOptions], Normalization] = Normalization
    attention: BuildPart = SelfAttention
    feed_forward: BuildPart = MLP
    cross_attention: BuildPart | None = None


# global layer index, from 0 -> spec
LayerSpecs = Callable[[int], LayerSpec]


def layer_specs(config: TransformerConfig) -> LayerSpecs:
    """Returns the specs for ``config``: each layer's attention, its window and positions, and MLP or experts."""
    attention = SelfAttention if config.mla is None else MLASelfAttention

    def spec_of(index: int) -> LayerSpec:
        window, rotates = config.attention.window_of(index), config.rope is not None and config.rope.rotates(index)
        has_experts = config.moe is not None and config.moe.has_experts(index)
        return LayerSpec(
            attention=partial(attention, window=window, rotates=rotates),
            feed_forward=partial(MoELayer, layer=index) if has_experts else MLP,
        )

    return spec_of
