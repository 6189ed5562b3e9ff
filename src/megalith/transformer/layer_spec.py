"""The modules that each layer is built from, chosen by the layer's global index.

Another feed-forward, a mixture of experts, a window, another attention: each is an entry, and the layer stays as it is.
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

    ``norm`` is a ``Normalization``. ``attention``, ``feed_forward``, and between them ``cross_attention``, where a
    layer has one, are modules called with
    (x [S, B, H], LayerContext) -> [S, B, H], [S/tp, B, H] each under sequence parallelism:
    ``functools.partial(SelfAttention, window=4096)``.
    """

    norm: Callable[[TransformerConfig, BuildOptions], Normalization] = Normalization
    attention: BuildPart = SelfAttention
    feed_forward: BuildPart = MLP
    cross_attention: BuildPart | None = None


# the spec of the layer with a global index, from 0
LayerSpecs = Callable[[int], LayerSpec]


def layer_specs(config: TransformerConfig) -> LayerSpecs:
    """The specs that ``config`` asks for: the window and positions of each layer's attention, and MLP or experts."""
    attention = SelfAttention if config.mla is None else MLASelfAttention

    def spec_of(index: int) -> LayerSpec:
        window, rotates = config.attention.window_of(index), config.rope is not None and config.rope.rotates(index)
        has_experts = config.moe is not None and config.moe.has_experts(index)
        return LayerSpec(
            attention=partial(attention, window=window, rotates=rotates),
            feed_forward=partial(MoELayer, layer=index) if has_experts else MLP,
        )

    return spec_of
