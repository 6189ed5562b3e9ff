"""LayerNorm and RMSNorm, whose weights are whole on every rank of tp.

    RMSNorm    y = x / sqrt(mean(x^2) + eps) * w                       Zhang and Sennrich 2019, arXiv:1910.07467
    LayerNorm  y = (x - mean(x)) / sqrt(var(x) + eps) * w + b          Ba et al. 2016, arXiv:1607.06450

The gain is 1 + w, and w begins at 0, where it is zero-centred. Of a residual stream in float32 the output has the dtype
of the weights again: that of the computation.

Under sequence parallelism a rank sees its own tokens only, so each rank's gradient of w and b is one term of a sum.
"""

from torch import Tensor, nn

from megalith.acceleration.recompute import DiscardableOutput
from megalith.config import TransformerConfig
from megalith.fusions import fused_add_norm, fused_rms_norm
from megalith.fusions.fused_layer_norm import fused_layer_norm
from megalith.numerics.dropout import Dropout
from megalith.parallel.build_options import BuildOptions
from megalith.parallel.parameters import DeclaringModule, ParameterSpec, local

__all__ = ["Normalization"]


class Normalization(DeclaringModule):
    """The norm that ``config.normalization`` names.

    Args:
        size: features that it is over; by default H.
        eps: added before the root; by default ``config.layernorm_epsilon``.
    """

    weight: nn.Parameter
    bias: nn.Parameter  # of LayerNorm alone

    def __init__(
        self, config: TransformerConfig, options: BuildOptions, size: int | None = None, eps: float | None = None
    ) -> None:
        super().__init__()
        self.normalization = config.normalization
        self.eps = config.layernorm_epsilon if eps is None else eps
        self.zero_centered = config.residual.zero_centered_norm
        self.reads_fp32 = config.residual.fp32
        self.partial = options.sequence_parallel
        self.normed = DiscardableOutput("layernorm")
        shape = (config.hidden_size if size is None else size,)
        gain = ParameterSpec(shape, "zeros" if self.zero_centered else "ones")
        self.declare("weight", gain, options.pg_collection, options.dtype)
        if self.normalization == "LayerNorm":
            self.declare("bias", ParameterSpec(shape, "zeros"), options.pg_collection, options.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], same dtype; that of the weights for a residual stream in float32."""
        y: Tensor = self.normed(self._normalize, x)
        return y

    def after_residual(self, x: Tensor, residual: Tensor, dropout: Dropout | None) -> tuple[Tensor, Tensor]:
        """The norm of ``residual + dropout(x)`` in the dtype of ``x``, and that sum in the dtype of ``residual``.

        All are [..., H].
        """
        weight, bias = self._parameters_here()
        y, total = fused_add_norm(
            x,
            residual,
            weight,
            bias,
            normalization=self.normalization,
            eps=self.eps,
            zero_centered=self.zero_centered,
            dropout=dropout,
        )
        # y is the norm of the sum as it is stored, and the sum is kept for the gradient
        return self.normed.computed(y, self._normalize, total), total

    def _normalize(self, x: Tensor) -> Tensor:
        weight, bias = self._parameters_here()
        if self.normalization == "RMSNorm":
            y = fused_rms_norm(x, weight, self.eps, self.zero_centered)
        else:
            y = fused_layer_norm(x, weight, bias, self.eps, self.zero_centered)
        return y.to(weight.dtype) if self.reads_fp32 else y

    def _parameters_here(self) -> tuple[Tensor, Tensor | None]:
        weight = local(self.weight, partial=self.partial)
        return weight, local(self.bias, partial=self.partial) if self.normalization == "LayerNorm" else None
