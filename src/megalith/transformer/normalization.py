"""LayerNorm and RMSNorm, whose weights are whole on every rank of tp.

    RMSNorm    y = x / sqrt(mean(x^2) + eps) * w                       Zhang and Sennrich 2019, arXiv:1910.07467
    LayerNorm  y = (x - mean(x)) / sqrt(var(x) + eps) * w + b          Ba et al. 2016, arXiv:1607.06450

Under sequence parallelism a rank sees its own tokens only, so each rank's gradient of w and b is one term of a sum.
"""

from torch import Tensor, nn

from megalith.config import TransformerConfig
from megalith.parallel.parameters import DeclaringModule, ParameterSpec, local
from megalith.transformer.build_options import BuildOptions

__all__ = ["Normalization"]


class Normalization(DeclaringModule):
    """The norm that ``config.normalization`` names, over H."""

    weight: nn.Parameter
    bias: nn.Parameter  # of LayerNorm alone

    def __init__(self, config: TransformerConfig, options: BuildOptions) -> None:
        super().__init__()
        self.normalization = config.normalization
        self.eps = config.layernorm_epsilon
        self.partial = options.sequence_parallel
        shape = (config.hidden_size,)
        self.declare("weight", ParameterSpec(shape, None, "ones"), options.pg_collection, options.dtype)
        if self.normalization == "LayerNorm":
            self.declare("bias", ParameterSpec(shape, None, "zeros"), options.pg_collection, options.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H], same dtype."""
        shape = x.shape[-1:]
        weight = local(self.weight, partial=self.partial)
        if self.normalization == "RMSNorm":
            return nn.functional.rms_norm(x, shape, weight, self.eps)
        return nn.functional.layer_norm(x, shape, weight, local(self.bias, partial=self.partial), self.eps)
