"""How a model is built, apart from its shape: the options that every model constructor passes down."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from megalith.config import DispatchConfig
from megalith.errors import ConfigError
from megalith.parallel.context.attention import ContextMethod
from megalith.parallel.expert.fused_a2a import FusedA2A
from megalith.parallel.expert.symmetric_a2a import SymmetricA2A
from megalith.parallel.linear import MatrixProduct, is_plain, linear
from megalith.topology.process_groups_config import ProcessGroupCollection

__all__ = ["BuildOptions", "LayerProduct", "MatrixProduct"]

# (index of a layer in its stack, number of layers in it) -> the product of its linear layers
LayerProduct = Callable[[int, int], MatrixProduct]


@dataclass(frozen=True)
class BuildOptions:
    """The groups to split over, the dtype of parameters, and the strategies that layers use.

    Attributes:
        sequence_parallel: activations between layers are [S/tp, B, H]. Always off if tp is 1.
        matrix_product: used by every linear layer, including the output projection. The default equals
            torch.nn.functional.linear in every bit, and is faster on some CPUs.
        context_method: how the ranks of cp exchange keys and values.
        fused_linear_cross_entropy: fuses the loss with the output projection, so that the logits of all tokens are
            never materialized.
        dispatch: how tokens are sent to the ranks of their experts.
        fused_a2a: the fused exchange over ep, used if ``dispatch.method`` is "flex".
        symmetric_a2a: the exchange through symmetric memory, used if ``dispatch.method`` is "symmetric".
        layer_product: chooses the matrix product of each transformer layer; None: ``matrix_product`` in all of them.

    Raises:
        ConfigError: ``fused_linear_cross_entropy`` together with a ``matrix_product``, which it would not call.
    """

    pg_collection: ProcessGroupCollection
    dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False
    matrix_product: MatrixProduct = linear
    context_method: ContextMethod = field(default_factory=ContextMethod)
    fused_linear_cross_entropy: bool = False
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    fused_a2a: FusedA2A | None = None
    symmetric_a2a: SymmetricA2A | None = None
    layer_product: LayerProduct | None = None

    def __post_init__(self) -> None:
        if self.fused_linear_cross_entropy and not is_plain(self.matrix_product):
            given = getattr(self.matrix_product, "__name__", self.matrix_product)
            raise ConfigError(
                "fused_linear_cross_entropy computes the output projection itself, with plain matrix products, and "
                f"would ignore matrix_product={given!r}; use only one of the two"
            )
        object.__setattr__(self, "sequence_parallel", self.sequence_parallel and self.pg_collection.size("tp") > 1)

    def of_layer(self, index: int, num_layers: int) -> "BuildOptions":
        """The options of the layer ``index`` of a stack: the layer's matrix product, and no loss to fuse."""
        if self.layer_product is None:
            return self
        product = self.layer_product(index, num_layers)
        return replace(self, matrix_product=product, layer_product=None, fused_linear_cross_entropy=False)
