"""Norms of queries and keys over the D features of each head, with one weight shared by all heads.

    RMSNorm    y = x / sqrt(mean(x^2) + eps) * w
    LayerNorm  y = (x - mean(x)) / sqrt(var(x) + eps) * w + b
    L2         y = x / sqrt(mean(x^2) + eps)

Henry et al. 2020, "Query-Key Normalization for Transformers", arXiv:2010.04245. Dehghani et al. 2023, arXiv:2302.05442,
section 2, use it to keep attention scores from growing in large models.
"""

from torch import Tensor, nn

from megalith.config import TransformerConfig
from megalith.fusions.fused_layer_norm import fused_layer_norm, fused_rms_norm
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.parameters import DeclaringModule, ParameterSpec, local

__all__ = ["HeadNorm"]


class HeadNorm(DeclaringModule):
    """The norm named by ``config.attention.qk_norm``, over D; its parameters are replicated over tp."""

    weight: nn.Parameter  # RMSNorm and LayerNorm only
    bias: nn.Parameter  # LayerNorm only

    def __init__(self, config: TransformerConfig, options: BuildOptions) -> None:
        super().__init__()
        self.kind = config.attention.qk_norm
        self.eps = config.layernorm_epsilon
        self.zero_centered = config.residual.zero_centered_norm
        shape = (config.kv_channels,)
        if self.kind != "L2":
            gain = ParameterSpec(shape, "zeros" if self.zero_centered else "ones")
            self.declare("weight", gain, options.pg_collection, options.dtype)
        if self.kind == "LayerNorm":
            self.declare("bias", ParameterSpec(shape, "zeros"), options.pg_collection, options.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[S, B, heads, D] -> same shape and dtype."""
        if self.kind == "L2":
            return fused_rms_norm(x, None, self.eps)
        # each rank of tp norms its own heads, so its gradient is one term of a sum
        weight = local(self.weight, partial=True)
        if self.kind == "RMSNorm":
            return fused_rms_norm(x, weight, self.eps, self.zero_centered)
        return fused_layer_norm(x, weight, local(self.bias, partial=True), self.eps, self.zero_centered)
