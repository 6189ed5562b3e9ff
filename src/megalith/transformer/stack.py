"""A sequence of transformer layers, named by their global indices."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import Tensor, nn

from megalith.config import TransformerConfig
from megalith.parallel.build_options import BuildOptions
from megalith.transformer.layer import TransformerLayer
from megalith.transformer.layer_context import KVCache, LayerContext
from megalith.transformer.layer_spec import LayerSpecs, layer_specs

__all__ = ["LayerStack"]


class LayerStack(nn.ModuleDict):
    """The layers ``indices`` of a model, keyed by index ("2", "3") and run in that order.

    A layer's initial weights and dropout masks depend on its name, and so on its place in the whole model: a stage that
    counted its layers from 0 would draw another stage's values. Modules that are added later are named here too, but
    must be run by whoever adds them. ``num_layers``: of the whole stack, by default ``config.num_layers``.
    """

    def __init__(
        self,
        config: TransformerConfig,
        options: BuildOptions,
        indices: Iterable[int],
        spec_of: LayerSpecs | None = None,
        num_layers: int | None = None,
    ) -> None:
        spec_of, total = spec_of or layer_specs(config), num_layers or config.num_layers
        super().__init__(
            {str(index): TransformerLayer(config, options.of_layer(index, total), spec_of(index)) for index in indices}
        )
        self.names = tuple(self)

    def forward(self, x: Tensor, context: LayerContext, caches: Mapping[int, KVCache] | None = None) -> Tensor:
        """[S, B, H] -> [S, B, H]; under sequence parallelism both are [S/tp, B, H]; ``caches`` by layer index."""
        for name in self.names:
            x = self[name](x, context if caches is None else replace(context, cache=caches[int(name)]))
        return x
